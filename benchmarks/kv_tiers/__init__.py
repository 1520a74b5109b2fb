"""Benchmarks of the tiers of the prefix cache."""
