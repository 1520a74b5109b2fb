"""Measures the tokens per step that draft tokens gain: proposers on real answers, and an oracle that knows them."""
