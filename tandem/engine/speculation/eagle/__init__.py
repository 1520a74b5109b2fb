"""EAGLE heads: one decoder layer, with its own KV, that predicts tokens from the hidden states of the target model."""
