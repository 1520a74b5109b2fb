"""Connection of commands to a cluster: addresses, state files, secrets, and their options."""
