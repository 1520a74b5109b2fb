"""Workers in the order in which they are asked."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import itemgetter

from router.worker_books import WorkerBooks

_worker = itemgetter(2)


class Ranking:
    """The smallest key first. A worker moves in some microseconds, however many there are."""

    def __init__(self) -> None:
        self._order: list[tuple[float, int, WorkerBooks]] = []
        self._keys: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[WorkerBooks]:
        """The first is asked first. Nothing may move meanwhile."""
        return map(_worker, self._order)

    def put(self, worker: WorkerBooks, key: float) -> None:
        """`worker` has `key` from now on."""
        slot = worker.slot
        old = self._keys.get(slot)
        if old == key:
            return
        if old is not None:
            del self._order[bisect_left(self._order, (old, slot))]
        self._keys[slot] = key
        insort(self._order, (key, slot, worker))

    def remove(self, worker: WorkerBooks) -> None:
        """`worker` is asked no more; nothing if it was not."""
        old = self._keys.pop(worker.slot, None)
        if old is not None:
            del self._order[bisect_left(self._order, (old, worker.slot))]
