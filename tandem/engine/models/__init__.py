"""Model architectures: model families, weights, and the decoder that runs them."""
