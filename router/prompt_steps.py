"""The steps that prompts take at one worker beside what decodes there, as its books stand."""

from __future__ import annotations

from costs.chunks import Beside, chunks_within, share
from costs.step_cost import StepCost
from wire.messages import Duty

Run = tuple[float, int, float]
"""Seconds and steps until prompts are computed, and the seconds of the longest of these steps."""
NO_PROMPTS: Run = (0.0, 0, 0.0)


class PromptSteps:
    """Made once for all prompts that are looked at until the worker's answers change."""

    __slots__ = ("_always", "_beside", "_cost", "_most", "_step_s", "_target_s")

    def __init__(self, cost: StepCost, duty: Duty | None, most: int, beside: Beside, step_s: float) -> None:
        """Steps of at most `most` tokens; without prompts they take `step_s`."""
        self._cost, self._most, self._beside, self._step_s = cost, most, beside, step_s
        self._always, self._target_s = share(cost, duty, most, beside)

    def run(self, tokens: int, pairs: float) -> Run:
        """Of so many tokens, at least one, with so many attention pairs."""
        cost, beside = self._cost, self._beside
        each, pause = self._always or chunks_within(cost, self._target_s, self._most, beside, pairs / tokens)
        rows, context, _ = beside
        if tokens <= each:
            seconds = cost.mixed_step_seconds(tokens, pairs, rows, context)
            return seconds + pause * self._step_s, 1, seconds
        full, rest = divmod(tokens, each)
        longest = cost.mixed_step_seconds(each, pairs / tokens * each, rows, context)
        steps = full + (rest > 0)
        seconds = full * longest + steps * pause * self._step_s
        if rest:
            seconds += cost.mixed_step_seconds(rest, pairs / tokens * rest, rows, context)
        return seconds, steps, longest
