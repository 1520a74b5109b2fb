"""Which answers at a worker can bear one more long step: each has so many gaps above its target to spare, and no more.

What counts is each answer's own share of long gaps. That most see few on average helps nobody who sees many, so
answers are counted by what is left to each of them, and what is still to come by its chance.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort

from router.slo import SloClass

HALF_LIFE_S = 5.0
"""Half of what is known of how often steps are long is forgotten after so long."""
_WINDOW_S = HALF_LIFE_S / math.log(2)


class LongGaps:
    """Of one class at one worker: a step is long if it takes more than the class's target there."""

    __slots__ = ("_at_s", "_levels", "_lost", "_recent", "passed", "target_s")

    def __init__(self, target_s: float) -> None:
        self.target_s = target_s
        self.passed = 0
        """Long steps so far, those that are on their way included."""
        self._levels: list[int] = []
        """For each answer, how far `passed` may grow before it has seen too many; rising."""
        self._lost = 0
        """The first of these have seen too many."""
        self._recent = 0.0
        self._at_s = 0.0

    def note(self, steps: int, longest_s: float, now: float) -> None:
        """So many steps are going to take up to `longest_s` each."""
        if longest_s > self.target_s:
            self.passed += steps
            self._lost = bisect_left(self._levels, self.passed)
            self._recent, self._at_s = self.per_s(now) * _WINDOW_S + steps, now

    def per_s(self, now: float) -> float:
        """Long steps a second, of late."""
        return self._recent * 2.0 ** ((self._at_s - now) / HALF_LIFE_S) / _WINDOW_S if self._recent else 0.0

    def add(self, spare: int) -> int:
        """An answer with so many long gaps to spare → what to give back to `remove`."""
        level = self.passed + spare
        insort(self._levels, level)
        return level

    def remove(self, level: int) -> None:
        """That answer has ended."""
        del self._levels[bisect_left(self._levels, level)]
        self._lost -= level < self.passed

    def broken_by(self, steps: int) -> int:
        """Answers that so many long steps more would cost their target."""
        return bisect_left(self._levels, self.passed + steps, self._lost) - self._lost


def spare_gaps(slo: SloClass, tokens: float) -> int:
    """How many gaps of an answer of so many tokens may be longer than its target."""
    return int(slo.gaps_allowed * max(0.0, tokens - 1) + 1e-6)


def chance_of_more(than: int, mean: float) -> float:
    """That something which happens `mean` times on average, by chance, happens more often than that (Poisson)."""
    if mean <= 0.0:
        return 0.0
    term = fewer = math.exp(-mean)
    for count in range(1, than + 1):
        term *= mean / count
        fewer += term
    return max(0.0, 1.0 - fewer)
