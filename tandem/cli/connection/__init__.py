"""The connection of commands to a cluster: addresses, state files, secrets, and the options for them."""
