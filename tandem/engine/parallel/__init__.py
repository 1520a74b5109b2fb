"""Tensor and pipeline parallelism: communication between ranks, and the model and the steps of a rank."""
