"""Sampling kernels of GPUs."""
