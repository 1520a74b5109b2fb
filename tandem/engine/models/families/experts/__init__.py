"""Families with experts whose attention keeps keys and values of each head."""
