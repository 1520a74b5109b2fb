"""Prometheus rules, their test cases, and a server that evaluates them over a running cluster."""
