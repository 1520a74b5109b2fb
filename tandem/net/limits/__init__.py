"""Limits of the ports that clients reach: sizes, counts and deadlines."""
