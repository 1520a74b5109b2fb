"""Quantizes a model's weights offline into a checkpoint of codes and scales, with or without calibration."""
