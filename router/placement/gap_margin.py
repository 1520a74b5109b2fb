"""How much longer gaps between tokens are at clients than a worker's decode steps as predicted."""

from __future__ import annotations

import math

from costs.quantile import followed

_MOST = 1.5
"""A larger margin would keep no promise: then something else uses the machine."""
_OVER = 0.005
"""The share of gaps that exceed the margin: half of what targets at the 99th percentile allow, as answers differ."""
_PACE = 0.02
"""What one step that exceeds the margin adds to it, all its rows together."""


class GapMargin:
    """Of one worker: a quantile of gap / predicted step, learned from gaps in which no prompt was computed there.

    Prediction errors and the delivery to the client both lengthen gaps, and how much that adds up to depends on the
    machine. On two H200s strict answers kept their class in 0.36 of the cases with a fixed margin, and in 0.99 with a
    learned one and held first tokens (docs/decisions/0014).
    """

    __slots__ = ("_prompts", "_quiet_since_s", "_value")

    def __init__(self) -> None:
        self._value = 0.0
        """0 = nothing was observed."""
        self._prompts = False
        self._quiet_since_s = -math.inf

    def of(self, prior: float) -> float:
        """The margin, `prior` before any gap was observed."""
        return self._value or prior

    def set_prompts(self, waiting: bool, now: float) -> None:
        """Whether prompts wait there."""
        if waiting is not self._prompts:
            self._prompts, self._quiet_since_s = waiting, now

    def observe(self, gap_s: float, step_s: float, rows: int, prior: float, now: float) -> None:
        """A gap of one of `rows` answers has ended; a step of them is predicted to take `step_s`."""
        if self._prompts or now - gap_s < self._quiet_since_s or not rows or step_s <= 0.0:
            return
        value = self.of(prior)
        value = followed(value, _OVER, _PACE / rows, larger=gap_s > value * step_s)
        self._value = min(max(value, 1.0), _MOST)
