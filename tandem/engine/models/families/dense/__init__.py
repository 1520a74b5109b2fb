"""Families of dense decoders: one gated or plain feed-forward layer after each attention layer."""
