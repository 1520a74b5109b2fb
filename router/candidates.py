"""Which workers placement looks at: those where little waits, and those that hold more of the prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

from router.fleet import Fleet
from router.placement import Need
from router.prefix_index import NO_MATCH
from router.worker_books import WorkerBooks

_LOOK = 64
"""Workers that are asked for room before a request waits; the order makes room behind them unlikely."""

Candidate = tuple[WorkerBooks, int]
"""A worker that takes the request, and the pages of the prompt that it holds."""
Takes = Callable[[WorkerBooks, Need], bool]


def first(ranking: Iterable[WorkerBooks], takes: Takes, need: Need, most: int) -> list[WorkerBooks]:
    """The first in the ranking that take the request."""
    found: list[WorkerBooks] = []
    for worker in islice(ranking, _LOOK):
        if takes(worker, need):
            found.append(worker)
            if len(found) == most:
                break
    return found


class Holders:
    """Who holds how much of one prompt."""

    __slots__ = ("_fleet", "_match", "_most", "_need")

    def __init__(self, need: Need, fleet: Fleet, most: int) -> None:
        """`most` of them are looked at."""
        self._need, self._fleet, self._most = need, fleet, most
        self._match = fleet.prefixes.match(need.digests) if need.digests else NO_MATCH

    def beside(self, workers: list[WorkerBooks], takes: Takes) -> list[Candidate]:
        """These `workers`, and those that hold more of the prompt than one of them."""
        match = self._match
        found = [(worker, match.pages(worker.slot)) for worker in workers]
        beyond = min([pages for _, pages in found], default=0)
        for slot, pages in match.longest(self._most, beyond):
            worker = self._fleet.worker(slot)
            if worker is not None and worker not in workers and takes(worker, self._need):
                found.append((worker, pages))
        return found
