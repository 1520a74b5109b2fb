"""Quantization of a model's weights into a checkpoint of codes and scales, offline, with or without calibration."""
