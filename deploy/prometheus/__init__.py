"""Prometheus rules, test cases for them, and a server that evaluates them over a running cluster."""
