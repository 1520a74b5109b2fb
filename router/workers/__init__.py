"""The router's connections to workers: membership, one link for each, leases, and updates of their prefix caches."""
