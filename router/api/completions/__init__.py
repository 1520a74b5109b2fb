"""Calls with several prompts, what replies say about prompts, and the best of several answers."""
