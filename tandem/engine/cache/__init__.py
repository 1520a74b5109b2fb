"""The paged KV cache: its memory, page pool, prefix cache and checksums."""
