"""Limits of the ports that clients can reach: sizes, counts and deadlines."""
