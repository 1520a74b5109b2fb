"""KV page transfer between workers: one interface, its NIXL implementation, and an in-memory fake for tests."""
