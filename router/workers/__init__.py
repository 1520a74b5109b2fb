"""The router's connections to workers: membership, one link to each, leases, what their prefix caches hold."""
