"""Operators' changes to a running cluster: mode, number of workers, drains and LoRA adapters."""
