"""Runs steps on a GPU: CUDA graphs, sampling on the device, and the start of an engine."""
