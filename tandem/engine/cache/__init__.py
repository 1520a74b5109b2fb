"""The paged KV cache: page pool, prefix cache and checksums."""
