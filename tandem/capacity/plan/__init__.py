"""Implements `tandem plan`: the workers and memory for a load, from the cost model and from simulated loads."""
