"""Quantization of a model's weights, and a table of the loss in quality."""
