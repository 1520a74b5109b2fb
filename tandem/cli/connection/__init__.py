"""How commands find and reach a cluster: addresses, state files, secrets, and the options for them."""
