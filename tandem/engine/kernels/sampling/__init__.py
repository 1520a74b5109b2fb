"""The sampling kernels of GPUs."""
