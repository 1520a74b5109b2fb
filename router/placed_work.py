"""What placed requests take of their workers, as books count it."""

from __future__ import annotations

from typing import NamedTuple

from costs.step_cost import chunk_pairs
from router.slo import SloClass


class PromptWork(NamedTuple):
    """What is left to compute of a prompt: `tokens` behind `cached` ones whose KV is there."""

    tokens: int
    cached: int = 0

    @property
    def pairs(self) -> float:
        """Attention pairs."""
        return chunk_pairs(self.tokens, self.cached)


class AnswerWork(NamedTuple):
    """What an answer takes: `pages` at most, and about `context` tokens of KV to attend to while it lasts; `spare` of
    its gaps may be longer than its target.
    """

    pages: int
    context: int
    slo: SloClass
    spare: int = 0
