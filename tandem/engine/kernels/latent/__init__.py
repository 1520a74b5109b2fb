"""Multi-head latent attention on GPUs: the store, absorbed attention of few tokens, expanded attention of prompts."""
