"""The attention kernels of GPUs."""
