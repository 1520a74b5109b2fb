"""How much longer gaps at clients are than a worker's steps as predicted, but for the few that a class allows.

Steps err, rows come while a prediction stands, and words have a way to go: how much that adds up to belongs to the
machine. So it is learned from the gaps as they leave in which nothing but decoding happened, and that were held up by
neither their reader nor the budget of chunks; steps with prompts are as long as they were planned to be.
"""

from __future__ import annotations

import math

from costs.chunks import GAP_NOISE
from costs.quantile import followed
from router.slo import SloClass

MOST = 1.5
"""Beyond, somebody else uses the machine: turning more away would not keep a promise."""
_PART = 0.5
"""Of the gaps that a class allows beyond its target, the part that is planned for: answers differ in how many they
see, and half of them would see more than the mean.
"""
_PACE = 0.02
"""What a step that took longer adds, all its rows together. The others take away as much as keeps the balance."""


class GapNoise:
    """Of one worker: for each class the quantile of gap ÷ predicted step. A standstill counts as one step."""

    __slots__ = ("_factors", "_quiet_s", "prompts")

    def __init__(self) -> None:
        self.prompts = False
        """Whether prompts are being computed there."""
        self._quiet_s = -math.inf
        self._factors: dict[SloClass, float] = {}

    def change(self, prompts: bool, now: float) -> None:
        """Prompts come to be computed there, or the last of them is."""
        self.prompts, self._quiet_s = prompts, now

    def note(self, slo: SloClass, gap_s: float, step_s: float, rows: int, now: float) -> None:
        """A gap of one of `rows` answers has ended; a step of them is predicted to take `step_s`."""
        if self.prompts or now - gap_s < self._quiet_s or not rows or step_s <= 0.0:
            return
        factor, over = self.of(slo), _PART * slo.gaps_allowed
        factor = followed(factor, over, _PACE / rows, larger=gap_s > factor * step_s)
        self._factors[slo] = min(max(factor, 1.0), MOST)

    def of(self, slo: SloClass) -> float:
        """By what steps are to be shorter than the class's target; `GAP_NOISE` before anything is known."""
        return self._factors.get(slo, GAP_NOISE)
