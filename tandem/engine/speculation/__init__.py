"""Speculative decoding: proposers predict the next tokens cheaply, and the model verifies several in one step."""
