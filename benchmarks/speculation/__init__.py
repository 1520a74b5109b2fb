"""Measures the tokens per step with draft tokens: from real proposers, and from an oracle that knows the answers."""
