"""Offline quantization of a model's weights into a checkpoint of codes and scales, with or without calibration."""
