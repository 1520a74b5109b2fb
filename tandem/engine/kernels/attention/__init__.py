"""Attention kernels of GPUs."""
