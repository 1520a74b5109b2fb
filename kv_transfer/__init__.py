"""Moving KV pages between workers: one interface, NIXL behind it, an in-memory fake beside it."""
