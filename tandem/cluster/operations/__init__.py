"""Operators' changes to a running cluster: modes, number of workers, draining."""
