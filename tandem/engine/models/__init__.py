"""Model architectures: families, their weights, and the decoder that runs them."""
