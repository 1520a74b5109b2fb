"""Mixtures of experts on NVIDIA GPUs, in Triton."""
