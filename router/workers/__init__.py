"""The router's connections to the workers: membership, one link per worker, leases, and prefix cache updates."""
