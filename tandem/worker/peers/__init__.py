"""Connections between workers, and the confirmations that travel over them."""
