"""Connections between workers, and the reports that are sent over them."""
