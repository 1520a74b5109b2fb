"""Kernels of all devices, behind one interface."""
