"""Measurements of the engine on a GPU, and the parts that they share."""
