"""Transfers between workers that divide a model among ranks, each in its own way."""
