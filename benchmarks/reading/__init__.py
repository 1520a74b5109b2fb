"""Measures the amount of code to read before a step, a hand-over or placement can be changed."""
