"""Speculative decoding: proposers guess the next tokens cheaply, and the model verifies several of them in one step."""
