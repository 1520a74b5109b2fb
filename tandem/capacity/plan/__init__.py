"""Implements `tandem plan`: computes the workers and memory that a load needs, by the cost model and by simulation."""
