"""Readers of model weights, and converters of other formats."""
