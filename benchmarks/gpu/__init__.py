"""Measurements of the engine on a GPU, and what they are made of."""
