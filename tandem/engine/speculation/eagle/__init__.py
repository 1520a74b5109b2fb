"""EAGLE heads: a decoder layer that goes on from the model's hidden states, with KV of its own."""
