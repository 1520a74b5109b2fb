"""The decode half of a worker: leases for what comes, the running batch for what has come."""
