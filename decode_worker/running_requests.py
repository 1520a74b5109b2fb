"""The access of the running batch to the requests of the decode half."""

import threading
from collections.abc import Collection, Sequence

from decode_worker.request import DecodeRequest
from decode_worker.requests import DecodeRequests


class RunningRequests:
    """Starts ready requests, allocates pages for their answers, and ends them.

    The engine thread calls the methods, which return at once, under the admission's lock; any thread may read counts.
    """

    def __init__(self, requests: DecodeRequests, lock: threading.Lock) -> None:
        self._requests = requests
        self._lock = lock

    def join(self, most: int) -> list[DecodeRequest]:
        """Start at most `most` ready requests, oldest first; the batch runs them until they `leave`."""
        with self._lock:
            return self._requests.join(most)

    def grow_all(self, requests: Sequence[DecodeRequest]) -> bool:
        """Allocate one more page to each of these requests of the batch, if that preempts none.

        Otherwise it returns False and changes nothing; the caller calls `grow`.
        """
        with self._lock:
            return self._requests.grow_all(requests)

    def grow(self, request: DecodeRequest, running: Collection[DecodeRequest]) -> bool:
        """Allocate one more page to a request of the batch `running`, if need be by preemption of it or another one.

        A preempted request without a step in flight leaves at once, others are `preempting`. Returns False if the
        request has no page in this step.
        """
        with self._lock:
            return self._requests.grow(request, running)

    def preempt(self, request: DecodeRequest) -> None:
        """End a preempting request that is in no step in flight: its router is notified, its pages are freed."""
        with self._lock:
            self._requests.preempt(request)

    def leave(self, request: DecodeRequest) -> None:
        """End a running request: its pages are freed or cached at once."""
        with self._lock:
            self._requests.leave(request)

    @property
    def ready(self) -> int:
        """The number of requests that wait for the running batch."""
        return len(self._requests.ready)

    @property
    def preemptions(self) -> int:
        """The number of requests that were preempted so far."""
        return self._requests.preemptions

    @property
    def cancelled(self) -> int:
        """The number of requests that were cancelled so far while they ran or were checked."""
        return self._requests.cancelled
