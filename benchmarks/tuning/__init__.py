"""Searches for the best tiles of kernels."""
