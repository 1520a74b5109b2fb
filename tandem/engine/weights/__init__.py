"""Reads model weights, and converts weights of other formats."""
