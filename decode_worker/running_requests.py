"""What the running batch has of the half's requests: those that are ready, pages for their answers, and their end."""

import threading
from collections.abc import Collection, Sequence

from decode_worker.holdings import Holdings
from decode_worker.request import DecodeRequest


class RunningRequests:
    """Methods are the engine thread's, and answer at once, under the admission's lock; counts are anybody's to read."""

    def __init__(self, held: Holdings, lock: threading.Lock) -> None:
        self._held = held
        self._lock = lock

    def join(self, room: int) -> list[DecodeRequest]:
        """At most `room` ready requests, oldest first, for the batch to run until they `leave`."""
        with self._lock:
            return self._held.join(room)

    def grow_all(self, requests: Sequence[DecodeRequest]) -> bool:
        """One more page for each of these requests of the batch, if nobody has to give way for it; else nothing
        changes, and it takes `grow`.
        """
        with self._lock:
            return self._held.grow_all(requests)

    def grow(self, request: DecodeRequest, running: Collection[DecodeRequest]) -> bool:
        """One more page for a request of the batch `running`, in which others may have to give way, or it may itself:
        those without a step in flight leave at once, the others are `yielding`. False if there is none for this step.
        """
        with self._lock:
            return self._held.grow(request, running)

    def preempt(self, request: DecodeRequest) -> None:
        """A yielding request, of which no step is in flight any more, is over: its router hears, its pages are free."""
        with self._lock:
            self._held.preempt(request)

    def leave(self, request: DecodeRequest) -> None:
        """A running request is over: its pages are free or cached at once."""
        with self._lock:
            self._held.leave(request)

    @property
    def ready(self) -> int:
        """Requests that wait for the running batch to take them."""
        return self._held.ready

    @property
    def preemptions(self) -> int:
        """Requests that had to give way to older ones."""
        return self._held.preemptions

    @property
    def cancelled(self) -> int:
        """Requests that were cancelled while they ran or were checked, so far: with each, it is to be looked for."""
        return self._held.cancelled
