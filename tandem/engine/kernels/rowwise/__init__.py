"""The row-wise kernels of GPUs: norm, RoPE, embedding, checksums."""
