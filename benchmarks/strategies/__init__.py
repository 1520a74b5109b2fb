"""Compares all ways to divide GPUs between prefill and decode under the same loads."""
