"""The policies of steps, as people name them (`step_policy.py`); whoever only chooses one needs no engine."""

from enum import StrEnum

CHUNKED_BUDGET = 512
"""Tokens of a step under `chunked`, decode rows included, if nothing else was asked for."""


class PolicyName(StrEnum):
    """How much of a step may be prompts where requests decode beside them."""

    UNCHUNKED = "unchunked"
    """Whole prompts, as many as the engine takes."""
    CHUNKED = "chunked"
    """As much as a token budget for the whole step leaves."""
    DECODE_PRIORITY = "decode-priority"
    """As much as the inter-token target leaves."""
