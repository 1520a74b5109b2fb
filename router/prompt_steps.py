"""The steps that prompts take at one worker beside what decodes there, as its books stand."""

from __future__ import annotations

from typing import NamedTuple

from costs.chunks import Beside, chunks, step_target
from costs.step_cost import StepCost
from wire.messages import Duty


class PromptRun(NamedTuple):
    """Seconds and steps until prompts are computed, and the longest of these steps."""

    seconds: float
    steps: int
    longest_s: float


NO_PROMPTS = PromptRun(0.0, 0, 0.0)


class PromptSteps:
    """Made once for all prompts that are looked at until the worker's answers change."""

    __slots__ = ("_beside", "_chunks", "_cost", "_duty", "_most", "_pause_s", "_target_s")

    def __init__(self, cost: StepCost, duty: Duty | None, most: int, beside: Beside) -> None:
        """Steps of at most `most` tokens."""
        self._cost, self._duty, self._most, self._beside = cost, duty, most, beside
        self._pause_s = cost.decode_step_seconds(beside.rows, beside.context_tokens)
        self._target_s = step_target(cost, duty, beside)
        self._chunks = chunks(cost, duty, most, beside, 0.0) if self._target_s is None else None

    def run(self, tokens: int, pairs: float) -> PromptRun:
        """Of so many tokens, with their attention pairs."""
        if not tokens:
            return NO_PROMPTS
        each, pause = self._chunks or chunks(
            self._cost, self._duty, self._most, self._beside, pairs / tokens, target_s=self._target_s
        )
        rows, context, _ = self._beside
        if tokens <= each:
            seconds = self._cost.mixed_step_seconds(tokens, pairs, rows, context)
            return PromptRun(seconds + pause * self._pause_s, 1, seconds)
        full, rest = divmod(tokens, each)
        longest = self._cost.mixed_step_seconds(each, pairs / tokens * each, rows, context)
        steps = full + (rest > 0)
        seconds = full * longest + steps * pause * self._pause_s
        if rest:
            seconds += self._cost.mixed_step_seconds(rest, pairs / tokens * rest, rows, context)
        return PromptRun(seconds, steps, longest)
