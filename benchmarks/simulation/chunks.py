"""When tokens leave the router, where many answers share a budget of chunks a second (`router/stream.py`)."""

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np


class Chunks:
    """First and last tokens never wait; the others go when the last flush is long enough ago."""

    def __init__(self, chunks_per_s: float, delay_max_s: float) -> None:
        self._per_s, self._most_s = chunks_per_s, delay_max_s

    def sent(self, answers: Sequence[Sequence[float]]) -> list[Sequence[float]]:
        """The moments at which tokens come to the router, by answer → those at which they leave it."""
        inner = np.sort(np.concatenate([np.asarray(each[1:-1]) for each in answers])) if answers else np.zeros(0)
        flushes = self._flushes(inner, answers)
        return [self._delayed(each, flushes) for each in answers]

    def _flushes(self, arrivals: np.ndarray, answers: Sequence[Sequence[float]]) -> list[float]:
        begun = sorted(each[0] for each in answers if len(each))
        ended = sorted(each[-1] for each in answers if len(each))
        flushes: list[float] = []
        last, at = -np.inf, 0
        while at < len(arrivals):
            first = float(arrivals[at])
            live = bisect_right(begun, first) - bisect_right(ended, first)
            last = max(first, last + min(live / self._per_s, self._most_s))
            flushes.append(last)
            at = int(np.searchsorted(arrivals, last, side="right"))
        return flushes

    @staticmethod
    def _delayed(answer: Sequence[float], flushes: Sequence[float]) -> Sequence[float]:
        if len(answer) < 3 or not flushes:
            return answer
        places = np.searchsorted(flushes, np.asarray(answer[1:-1]), side="left")
        moments = np.minimum(np.asarray(flushes)[np.minimum(places, len(flushes) - 1)], answer[-1])
        return [answer[0], *moments.tolist(), answer[-1]]
