"""The router over fake workers of the router's tests."""

from tests.unit.router.conftest import cluster, model, settings, tokenizer

__all__ = ["cluster", "model", "settings", "tokenizer"]
