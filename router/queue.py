"""Requests that wait for a worker: larger priority first, then order of arrival."""

import heapq
from collections.abc import Iterator

from router.request import RoutedRequest


class RequestQueue:
    """A bounded priority queue whose members may leave from the middle."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._heap: list[tuple[int, int, str]] = []
        self._waiting: dict[str, RoutedRequest] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[RoutedRequest]:
        """The waiting requests, in no order."""
        return iter(list(self._waiting.values()))

    @property
    def full(self) -> bool:
        return len(self._waiting) >= self._limit

    def push(self, request: RoutedRequest) -> None:
        """Add `request`; one that comes back keeps its place. Whether there is room is the caller's question."""
        self._waiting[request.wire_id] = request
        heapq.heappush(self._heap, (-request.admitted.priority, request.sequence, request.wire_id))

    def head(self) -> RoutedRequest | None:
        """The request whose turn it is; it stays."""
        while self._heap:
            request = self._waiting.get(self._heap[0][2])
            if request is not None:
                return request
            heapq.heappop(self._heap)
        return None

    def remove(self, request: RoutedRequest) -> None:
        """Take `request` out, wherever it stands; nothing if it does not wait."""
        if self._waiting.pop(request.wire_id, None) is None:
            return
        # Entries of those that left stay in the heap until they surface; a rebuild bounds their number.
        if len(self._heap) > 2 * len(self._waiting) + 64:
            self._heap = [entry for entry in self._heap if entry[2] in self._waiting]
            heapq.heapify(self._heap)
