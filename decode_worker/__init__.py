"""The decode phase of a worker: leases for KV that will arrive, and the running batch for KV that has arrived."""
