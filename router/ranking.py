"""Workers in the order in which they are asked."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from router.worker_books import WorkerBooks


class Ranking:
    """The smallest key first. A worker moves in some microseconds, however many there are."""

    def __init__(self) -> None:
        self._order: list[tuple[float, int]] = []
        self._keys: dict[int, float] = {}
        self._workers: dict[int, WorkerBooks] = {}

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[WorkerBooks]:
        """The first is asked first. Nothing may move meanwhile."""
        workers = self._workers
        return (workers[slot] for _, slot in self._order)

    def put(self, worker: WorkerBooks, key: float) -> None:
        """`worker` has `key` from now on."""
        slot = worker.slot
        old = self._keys.get(slot)
        if old == key:
            return
        if old is not None:
            del self._order[bisect_left(self._order, (old, slot))]
        self._keys[slot] = key
        self._workers[slot] = worker
        insort(self._order, (key, slot))

    def remove(self, worker: WorkerBooks) -> None:
        """`worker` is asked no more; nothing if it was not."""
        old = self._keys.pop(worker.slot, None)
        if old is not None:
            del self._order[bisect_left(self._order, (old, worker.slot))]
            del self._workers[worker.slot]
