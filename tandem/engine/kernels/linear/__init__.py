"""The matrix product kernels of GPUs, for weights that are not packed."""
