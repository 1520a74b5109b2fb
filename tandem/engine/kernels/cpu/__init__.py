"""Kernels of CPUs, compiled with Numba."""
