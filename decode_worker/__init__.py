"""The decode phase of a worker: leases for KV that is to arrive, and the running batch for KV that has arrived."""
