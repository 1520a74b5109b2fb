"""Prompts that are over and whose writes are not."""

from __future__ import annotations

from kv_transfer.lost_pages import LostPages
from prefill_worker.request import PrefillRequest


class Restless:
    """Their pages wait until nothing reads them any more, for as long as that takes: a decode worker that stands still
    with its connection whole keeps them. Guarded by the prefill half's lock.
    """

    def __init__(self, lost: LostPages, pool_pages: int) -> None:
        self._lost = lost
        self._pool_pages = pool_pages
        self._requests: set[PrefillRequest] = set()

    @property
    def pages(self) -> int:
        """How many pages they keep."""
        return len({page for request in self._requests for page in request.pages})

    @property
    def not_ready(self) -> str:
        """Why no prompt is taken for now, in words; empty = prompts are taken."""
        return self._lost.not_ready

    def add(self, request: PrefillRequest) -> None:
        """It is over, and its writes move on."""
        self._requests.add(request)
        self._look()

    def discard(self, request: PrefillRequest) -> None:
        """Nothing reads its pages any more."""
        if request in self._requests:
            self._requests.discard(request)
            self._look()

    def _look(self) -> None:
        self._lost.look(self.pages, self._pool_pages, self._why)

    def _why(self) -> str:
        places = (request.task.destination for request in self._requests)
        readers = ", ".join(sorted({place.peer.worker_id for place in places if place is not None}))
        return (
            f"are still being written to {readers}, though their prompts are over; they are free once those writes"
            " rest: look at those workers, or restart them"
        )
