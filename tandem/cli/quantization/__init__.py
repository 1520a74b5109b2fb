"""Quantization of a model's weights, and the table of what it costs in quality."""
