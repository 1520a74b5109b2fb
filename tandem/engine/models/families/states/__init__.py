"""Families with state layers, most of whose layers keep a state instead of keys and values."""
