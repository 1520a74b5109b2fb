"""Measures how quantization or another dtype changes predictions: `python -m benchmarks.quality MODEL`."""
