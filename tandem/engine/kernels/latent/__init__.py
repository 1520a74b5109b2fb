"""Multi-head latent attention (MLA) on GPUs: store, absorbed attention of few tokens, expanded attention of prompts."""
