"""A worker process: one engine, one page pool, the schedulers of two phases, one gRPC port."""
