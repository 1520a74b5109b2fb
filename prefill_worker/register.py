"""Who has given this worker a prompt, and whether another one may."""

from __future__ import annotations

from collections.abc import Iterator

from prefill_worker.request import PrefillRequest
from wire.errors import ResourceExhausted, RoleClosed, StaleEpoch
from wire.messages import PeerRef, PrefillTask, RequestRef

RETRY_AFTER_S = 0.2

_Key = tuple[str, str]


class PromptRegister:
    """The newest attempt of each request, by router and name, and those that newer ones have replaced, until their
    handoffs have ended. Guarded by the prefill half's lock.
    """

    def __init__(self, me: PeerRef, max_requests: int) -> None:
        self._me = me
        self._max_requests = max_requests
        self._requests: dict[_Key, PrefillRequest] = {}
        self._replaced: set[PrefillRequest] = set()
        self.closed = ""
        """Why nothing new is taken, in words; empty = it is."""
        self.fenced = 0
        """Attempts that came after newer ones."""

    def __len__(self) -> int:
        return len(self._requests) + len(self._replaced)

    def __iter__(self) -> Iterator[tuple[str, PrefillRequest]]:
        """Those that nobody has replaced, with their routers."""
        return ((router_id, request) for (router_id, _), request in self._requests.items())

    def find(self, router_id: str, ref: RequestRef) -> PrefillRequest | None:
        """The newest attempt of this request, unless it is newer than `ref`."""
        request = self._requests.get((router_id, ref.request_id))
        return None if request is None or request.task.ref.attempt > ref.attempt else request

    def knows(self, task: PrefillTask) -> bool:
        """Whether this very attempt is here already."""
        known = self._requests.get(_key_of(task))
        return known is not None and known.task.ref.attempt == task.ref.attempt

    def check_room(self, task: PrefillTask, not_ready: str) -> None:
        """StaleEpoch for what comes too late, RoleClosed while closed, ResourceExhausted when too many are known or the
        worker is `not_ready`, which says why.
        """
        known = self._requests.get(_key_of(task))
        if known is not None and known.task.ref.attempt > task.ref.attempt:
            self.fenced += 1
            raise StaleEpoch(f"attempt {task.ref.attempt} of {task.ref.request_id} is over; a later one runs")
        if self.closed:
            raise RoleClosed(f"worker {self._me.worker_id} takes no prompts, as it {self.closed}; ask another one")
        if not_ready:
            raise self._come_back(f"takes no prompts for now: {not_ready}")
        if len(self) >= self._max_requests:
            raise self._come_back(f"holds {self._max_requests} prompts; come back later")

    def enter(self, request: PrefillRequest) -> PrefillRequest | None:
        """From now on this is the newest attempt; returns the one that it replaces."""
        key = _key_of(request.task)
        replaced = self._requests.get(key)
        if replaced is not None:
            self._replaced.add(replaced)
        self._requests[key] = request
        return replaced

    def leave(self, request: PrefillRequest) -> None:
        """Its handoff has ended."""
        key = _key_of(request.task)
        if self._requests.get(key) is request:
            del self._requests[key]
        self._replaced.discard(request)

    def _come_back(self, why: str) -> ResourceExhausted:
        return ResourceExhausted(f"worker {self._me.worker_id} {why}", retry_after_s=RETRY_AFTER_S)


def _key_of(task: PrefillTask) -> _Key:
    return task.router_id, task.ref.request_id
