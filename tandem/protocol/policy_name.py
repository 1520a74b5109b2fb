"""The names of the step policies, which `tandem.cost_model.chunks.step_limit` implements."""

from enum import StrEnum

CHUNKED_BUDGET = 512
"""Default maximum number of tokens of a step with both prompts and decode rows, decode rows included."""
BACKLOG_BUDGET = 2 * CHUNKED_BUDGET
"""The most to which that default grows under `DECODE_PRIORITY` while prompts wait (`tandem.cost_model.chunks`)."""


class PolicyName(StrEnum):
    """The step policy: how many prompt tokens a step with decode rows may have.

    No policy exceeds the ITL targets.
    """

    UNCHUNKED = "unchunked"
    """Whole prompts, up to the engine's limit."""
    CHUNKED = "chunked"
    """Chunks that fill the rest of the step's token budget."""
    DECODE_PRIORITY = "decode-priority"
    """Chunks as long as the ITL targets allow; while any decoding request has no ITL target, also within the budget."""


DEFAULT_STEP_POLICY = PolicyName.DECODE_PRIORITY
