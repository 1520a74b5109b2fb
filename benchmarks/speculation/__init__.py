"""Measures speculative decoding: acceptance on real texts, and speed beside steps without drafts."""
