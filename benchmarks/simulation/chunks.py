"""Simulates when tokens leave the router, whose answers share a budget of chunks per second.

The router's code is in `router/requests/stream.py`.
"""

from collections.abc import Sequence

import numpy as np

from router.requests.chunk_budget import ChunkBudget


class Chunks:
    """Delays tokens by the router's budget; first and last tokens never wait."""

    def __init__(self, chunks_per_s: float, delay_max_s: float) -> None:
        self._budget = ChunkBudget(chunks_per_s, delay_max_s)

    def sent(self, answers: Sequence[Sequence[float]]) -> list[Sequence[float]]:
        """Returns the times at which tokens leave the router, for the times at which they reach it, by answer."""
        flushes = self._flushes([np.asarray(each[1:-1]) for each in answers])
        return [self._delayed(each, flushes) for each in answers]

    def _flushes(self, inner: Sequence[np.ndarray]) -> list[float]:
        if not inner:
            return []
        arrivals = np.concatenate(inner)
        order = np.argsort(arrivals, kind="stable")
        arrivals, owners = arrivals[order], np.repeat(np.arange(len(inner)), [len(each) for each in inner])[order]
        flushes: list[float] = []
        at = 0
        while at < len(arrivals):
            first = float(arrivals[at])
            together = int(np.searchsorted(arrivals, first, side="right"))
            last = first + self._budget.wait_s(first, together - at)
            end = int(np.searchsorted(arrivals, last, side="right"))
            self._budget.spend(last, len(np.unique(owners[at:end])))
            flushes.append(last)
            at = end
        return flushes

    @staticmethod
    def _delayed(answer: Sequence[float], flushes: Sequence[float]) -> Sequence[float]:
        if len(answer) < 3 or not flushes:
            return answer
        places = np.searchsorted(flushes, np.asarray(answer[1:-1]), side="left")
        moments = np.minimum(np.asarray(flushes)[np.minimum(places, len(flushes) - 1)], answer[-1])
        return [answer[0], *moments.tolist(), answer[-1]]
