"""The names of the step policies; see `costs.chunks.step_limit` for what they do."""

from enum import StrEnum

CHUNKED_BUDGET = 512
"""Tokens of a step beside decode rows, these included, if no other budget was asked for."""


class PolicyName(StrEnum):
    """How many prompt tokens a step may have beside requests that decode. No policy exceeds the answers' targets."""

    UNCHUNKED = "unchunked"
    """Whole prompts, as many as the engine takes."""
    CHUNKED = "chunked"
    """What the token budget of the step leaves."""
    DECODE_PRIORITY = "decode-priority"
    """The same beside answers without a target; where all have one, as many as the targets leave time for."""
