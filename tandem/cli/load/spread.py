"""Summaries of measured durations: mean, percentiles, and a curve for plots."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

LEVELS = (*range(0, 99, 2), 99, 99.5, 99.9, 100)
"""The percentiles of a curve; 0 is the minimum, 100 the maximum."""
_TO_MS = 1e3


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile by the nearest-rank method; the result is always an element of `values`."""
    return sorted(values)[_rank(len(values), percent)]


def _rank(count: int, percent: float) -> int:
    # Round first: 99.9 % of 1000 must be 999, not the 999.0000000000001 of floating point.
    return max(0, math.ceil(round(percent / 100 * count, 6)) - 1)


@dataclass(frozen=True, slots=True)
class Spread:
    """The summary of `count` durations in seconds; `curve` has the nearest-rank percentiles at `LEVELS`.

    Without durations all fields are 0, and the curve is empty.
    """

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    worst: float
    curve: tuple[float, ...]

    @classmethod
    def of(cls, durations: Iterable[float | None]) -> "Spread":
        """Summarize durations in seconds; None values are skipped."""
        values = np.sort([duration for duration in durations if duration is not None])
        if values.size == 0:
            return cls(0, 0.0, 0.0, 0.0, 0.0, 0.0, ())

        def at(percent: float) -> float:
            return float(values[_rank(values.size, percent)])

        return cls(values.size, float(values.mean()), at(50), at(90), at(99), at(100), tuple(map(at, LEVELS)))

    def in_ms(self) -> dict[str, object]:
        """Return the summary as JSON, in milliseconds."""
        names = ("mean", "p50", "p90", "p99", "worst")
        figures: dict[str, object] = {name: round(getattr(self, name) * _TO_MS, 3) for name in names}
        return {"count": self.count, **figures, "curve": [round(duration * _TO_MS, 3) for duration in self.curve]}
