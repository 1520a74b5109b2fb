"""Training of the weights that propose draft tokens for speculative decoding."""
