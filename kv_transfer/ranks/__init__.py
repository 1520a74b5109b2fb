"""Transfers between workers whose ranks divide a model, which each worker may do differently."""
