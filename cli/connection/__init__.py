"""How commands find a cluster and prove who they are: addresses, state files, secrets, their options."""
