"""Readers of model weights."""
