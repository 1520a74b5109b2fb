"""The kernels for CPUs, compiled with Numba."""
