"""The live workers in the order in which placement considers them, and what they are known to hold and to reject."""

import heapq
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from itertools import product, takewhile
from operator import itemgetter

from router.placement.prefix_index import PrefixIndex
from router.placement.worker_state import WorkerState
from tandem.protocol.messages import PeerRef

REMEMBERED_S = 300.0
"""The time for which a pair counts as incompatible; it bounds the harm of an accidental rejection."""
Rank = tuple[bool, float]
"""True for a worker that is full, and its load."""


class Ranking:
    """Workers sorted by a key: those that are full last. Moving one takes microseconds, however many there are."""

    def __init__(self) -> None:
        self._order: list[tuple[Rank, int, WorkerState]] = []
        self._keys: dict[int, Rank] = {}

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[WorkerState]:
        """Iterate from the smallest key; the ranking must not be changed meanwhile."""
        return map(itemgetter(2), self._order)

    def with_capacity(self) -> Iterator[WorkerState]:
        """Iterate over those that are not full, in this order."""
        return map(itemgetter(2), takewhile(lambda entry: not entry[0][0], self._order))

    def put(self, worker: WorkerState, key: Rank | None) -> None:
        """Set the key of `worker`; None removes it."""
        old = self._keys.get(worker.slot)
        if old == key:
            return
        if old is not None:
            del self._order[bisect_left(self._order, (old, worker.slot))], self._keys[worker.slot]
        if key is not None:
            insort(self._order, (key, worker.slot, worker))
            self._keys[worker.slot] = key


class IncompatiblePairs:
    """Pairs of workers that rejected each other: other releases, models or KV settings, as in a rolling update.

    A worker that registers again is another run (`PeerRef`), of which nothing is known.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pairs: dict[tuple[PeerRef, PeerRef], tuple[float, str]] = {}

    def __len__(self) -> int:
        return len(self._pairs)

    def learn(self, prefill: PeerRef, decode: PeerRef, why: str) -> None:
        """Add a pair that rejected each other for this reason."""
        self._pairs[prefill, decode] = self._clock() + REMEMBERED_S, why

    def fit(self, prefill: PeerRef, decode: PeerRef) -> bool:
        """Return True if these two may serve a request together, as far as is known."""
        return (prefill, decode) not in self._pairs

    def forget_old(self) -> bool:
        """Forget expired pairs; return True if there were any. Called periodically."""
        before = len(self._pairs)
        self._pairs = {pair: known for pair, known in self._pairs.items() if known[0] > self._clock()}
        return len(self._pairs) < before

    def why(self, prefills: Iterable[PeerRef], decodes: Iterable[PeerRef]) -> str:
        """Return the reason of the first rejection between these; "" without one."""
        known = (self._pairs.get(pair) for pair in product(prefills, decodes))
        return next((each[1] for each in known if each is not None), "")


class Fleet:
    """The workers: each may be live between `join` and `leave`."""

    def __init__(self) -> None:
        self.prefixes = PrefixIndex()
        self.incompatible = IncompatiblePairs()
        self.live: list[WorkerState] = []
        """The live workers, in no order."""
        self._by_slot: dict[int, WorkerState] = {}
        self._free_slots: list[int] = []
        self.prefills = Ranking()
        """The live workers that prefill, by the prompt tokens that wait there and the decode rows."""
        self.decodes = Ranking()
        """The live workers that decode, by `step seconds / free share of pages`."""
        self.both_roles = 0
        """The number of live workers with both roles."""
        self.changes = 0
        """The number of times that workers came, went, changed or became compatible again."""

    def worker(self, slot: int) -> WorkerState | None:
        """Return the live worker with this number in the prefix index, None if it is not live."""
        worker = self._by_slot.get(slot)
        return worker if worker is not None and worker.live else None

    def join(self, worker: WorkerState) -> None:
        """Give `worker` a number. It is not live before `set_live`."""
        worker.slot = heapq.heappop(self._free_slots) if self._free_slots else len(self._by_slot)
        self._by_slot[worker.slot], worker.on_change = worker, self.rank
        self.prefixes.open(worker.slot, worker.info.pages_total)

    def leave(self, worker: WorkerState) -> None:
        """Remove `worker` and what it held."""
        self.set_live(worker, live=False)
        worker.on_change = None
        self.prefixes.drop(worker.slot)
        del self._by_slot[worker.slot]
        heapq.heappush(self._free_slots, worker.slot)

    def set_live(self, worker: WorkerState, *, live: bool) -> None:
        """Set whether `worker` takes new work; called again when its facts have changed."""
        self.changes += 1
        worker.live = live
        self.live = [each for each in self._by_slot.values() if each.live]
        self.both_roles = sum(each.prefills and each.decodes for each in self.live)
        worker.refresh()

    def rank(self, worker: WorkerState) -> None:
        """Set the order of `worker` among the others."""
        self.prefills.put(worker, worker.prompt_rank if worker.live and worker.prefills else None)
        self.decodes.put(worker, worker.answer_rank if worker.live and worker.decodes else None)
