"""The steps that prompts take at one worker beside what decodes there, as its books stand."""

from __future__ import annotations

import math

from costs.chunks import Beside, chunks_within, gap_target, keeps_targets, steady_chunks
from costs.step_cost import StepCost
from wire.messages import Duty

Run = tuple[float, int, float]
"""Seconds and steps until prompts are computed, and the seconds of the longest of these steps."""
NO_PROMPTS: Run = (0.0, 0, 0.0)


class PromptSteps:
    """Made once for all prompts that are looked at until the worker's answers change."""

    __slots__ = ("_beside", "_cost", "_most", "_rows_s", "_steady", "_target_s", "keeps_first_gaps")

    def __init__(self, cost: StepCost, duty: Duty | None, most: int, beside: Beside) -> None:
        """Steps of at most `most` tokens."""
        self._cost, self._most, self._beside = cost, most, beside
        self.keeps_first_gaps = keeps_targets(duty)
        """Whether they are shorter while an answer waits for its second token."""
        rows, context, targets = beside
        self._rows_s = cost.rows_seconds(rows, context)
        self._steady = steady_chunks(cost, duty, most, rows)
        self._target_s = math.inf
        if self._steady is None:
            self._target_s = gap_target(cost, duty.itl_target_s if duty else None, rows, context, targets)

    def run(self, tokens: int, pairs: float) -> Run:
        """Of so many tokens, at least one, with so many attention pairs."""
        cost, rows_s, rows = self._cost, self._rows_s, self._beside[0]
        each, pause = self._steady or chunks_within(self._target_s, cost, self._most, self._beside, pairs / tokens)
        if tokens <= each:
            seconds = rows_s + cost.prompts_seconds(tokens, pairs, rows)
            return seconds + pause * rows_s, 1, seconds
        full, rest = divmod(tokens, each)
        longest = rows_s + cost.prompts_seconds(each, pairs / tokens * each, rows)
        steps = full + (rest > 0)
        seconds = full * longest + steps * pause * rows_s
        if rest:
            seconds += rows_s + cost.prompts_seconds(rest, pairs / tokens * rest, rows)
        return seconds, steps, longest
