"""Matrix product kernels of GPUs."""
