"""Training of the weights that propose drafts for speculative decoding."""
