"""A worker process: one engine, one page pool, two halves, one gRPC port."""
