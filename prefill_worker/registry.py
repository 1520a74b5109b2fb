"""The prompts that this worker has accepted, and those that have ended while their transfer continues."""

from __future__ import annotations

from collections.abc import Iterator

from kv_transfer.lost_pages import LostPages
from prefill_worker.request import PrefillRequest
from tandem.protocol.errors import ResourceExhausted, RoleClosed, StaleEpoch
from tandem.protocol.kv_pages import held_pages
from tandem.protocol.messages import PeerRef, PrefillTask, RequestRef

RETRY_AFTER_S = 0.2

_Key = tuple[str, str]


class RequestRegistry:
    """The newest attempt of each request, by router and request id. Decides whether a new prompt is accepted.

    Replaced attempts are kept until their hand-over has ended. Owned by the prefill scheduler and guarded by its lock.
    """

    def __init__(self, me: PeerRef, max_requests: int) -> None:
        self._me = me
        self._max_requests = max_requests
        self._requests: dict[_Key, PrefillRequest] = {}
        self._replaced: set[PrefillRequest] = set()
        self.closed = ""
        """The reason why no prompt is accepted; empty if prompts are accepted."""
        self.fenced = 0
        """The number of attempts that were rejected because a newer attempt was known."""

    def __len__(self) -> int:
        return len(self._requests) + len(self._replaced)

    def __iter__(self) -> Iterator[tuple[str, PrefillRequest]]:
        """Iterate over the newest attempts, as pairs of router id and request."""
        return ((router_id, request) for (router_id, _), request in self._requests.items())

    def adapters(self) -> set[str]:
        """Return the adapter hashes of all attempts, including replaced ones; "" stands for the base model."""
        return {request.task.adapter for request in (*self._requests.values(), *self._replaced)}

    def find(self, router_id: str, ref: RequestRef) -> PrefillRequest | None:
        """Return the newest known attempt of the request.

        Returns None if the request is unknown, or if that attempt is newer than the one in `ref`.
        """
        request = self._requests.get((router_id, ref.request_id))
        return None if request is None or request.task.ref.attempt > ref.attempt else request

    def knows(self, task: PrefillTask) -> bool:
        """Return True if this attempt of the request is the registered one."""
        known = self._requests.get(_key_of(task))
        return known is not None and known.task.ref.attempt == task.ref.attempt

    def check_accepts(self, task: PrefillTask, not_ready: str) -> None:
        """Raise an error if the task cannot be accepted.

        Raises StaleEpoch if a newer attempt is known, RoleClosed while closed, and ResourceExhausted if there are too
        many requests or if the worker is not ready, for the reason `not_ready`.
        """
        known = self._requests.get(_key_of(task))
        if known is not None and known.task.ref.attempt > task.ref.attempt:
            self.fenced += 1
            raise StaleEpoch(f"attempt {task.ref.attempt} of {task.ref.request_id} has ended; a later one runs")
        if self.closed:
            raise RoleClosed(f"worker {self._me.worker_id} takes no prompts, as it {self.closed}; ask another one")
        if not_ready:
            raise self._come_back(f"takes no prompts for now: {not_ready}")
        if len(self) >= self._max_requests:
            raise self._come_back(f"holds {self._max_requests} prompts; come back later")

    def add(self, request: PrefillRequest) -> PrefillRequest | None:
        """Register the newest attempt of a request, and return the attempt that it replaces."""
        key = _key_of(request.task)
        replaced = self._requests.get(key)
        if replaced is not None:
            self._replaced.add(replaced)
        self._requests[key] = request
        return replaced

    def remove(self, request: PrefillRequest) -> None:
        """Remove a request whose hand-over has ended."""
        key = _key_of(request.task)
        if self._requests.get(key) is request:
            del self._requests[key]
        self._replaced.discard(request)

    def _come_back(self, why: str) -> ResourceExhausted:
        return ResourceExhausted(f"worker {self._me.worker_id} {why}", retry_after_s=RETRY_AFTER_S)


class PendingTransfers:
    """The requests that have ended while writes still read their pages.

    The pages stay allocated until the writes have ended, however long that takes: if a decode worker hangs but its
    connection is intact, a write stays in progress. Owned by the prefill scheduler and guarded by its lock.
    """

    def __init__(self, lost: LostPages, pool_pages: int) -> None:
        self._lost = lost
        self._pool_pages = pool_pages
        self._requests: set[PrefillRequest] = set()

    @property
    def pages(self) -> int:
        """The number of pages that the pending transfers keep allocated."""
        return len({page for request in self._requests for page in held_pages(request.pages)})

    @property
    def not_ready(self) -> str:
        """The reason why prompts are rejected because of lost pages; empty if they are accepted."""
        return self._lost.not_ready

    def add(self, request: PrefillRequest) -> None:
        """Add a request that has ended while its writes continue."""
        self._requests.add(request)
        self._update()

    def discard(self, request: PrefillRequest) -> None:
        """Remove a request once its writes have ended."""
        if request in self._requests:
            self._requests.discard(request)
            self._update()

    def _update(self) -> None:
        self._lost.update(self.pages, self._pool_pages, self._why)

    def _why(self) -> str:
        places = (request.task.destination for request in self._requests)
        readers = ", ".join(sorted({place.peer.worker_id for place in places if place is not None}))
        return (
            f"are still being written to {readers}, though their prompts are over; they are free once those writes"
            " rest: look at those workers, or restart them"
        )


def _key_of(task: PrefillTask) -> _Key:
    return task.router_id, task.ref.request_id
