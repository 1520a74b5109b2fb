"""Compares all divisions of GPUs between prefill and decode under the same loads."""
