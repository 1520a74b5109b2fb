"""Searches for the tiles of kernels."""
