"""The names of the step policies, which `tandem.cost_model.chunks.step_limit` implements."""

from enum import StrEnum

CHUNKED_BUDGET = 512
"""Default token budget of a mixed step, decode rows included."""


class PolicyName(StrEnum):
    """The policy for the number of prompt tokens in a mixed step. No policy exceeds the ITL targets."""

    UNCHUNKED = "unchunked"
    """Whole prompts, up to the engine's limit."""
    CHUNKED = "chunked"
    """Chunks that fill the rest of the step's token budget."""
    DECODE_PRIORITY = "decode-priority"
    """The tokens of `CHUNKED` if a decoding request has no ITL target, else as many as the targets allow."""
