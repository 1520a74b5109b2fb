"""EAGLE heads: one decoder layer, with its own KV, that continues from the hidden states of the target model."""
