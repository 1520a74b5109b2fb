"""The live workers in the order in which placement considers them, and what they are known to hold and to reject."""

from __future__ import annotations

import heapq
import math
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Iterator
from operator import itemgetter

from router.placement.prefix_index import PrefixIndex
from router.placement.worker_state import LoadObserver, WorkerState
from wire.messages import PeerRef

REMEMBERED_S = 300.0
"""The time for which a pair counts as incompatible; it bounds the harm of an accidental rejection."""
_worker = itemgetter(2)


class Ranking:
    """Workers sorted by a key. Moving one takes microseconds, however many there are."""

    def __init__(self) -> None:
        self._order: list[tuple[float, int, WorkerState]] = []
        self._keys: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[WorkerState]:
        """Iterate from the smallest key; the ranking must not be changed meanwhile."""
        return map(_worker, self._order)

    def put(self, worker: WorkerState, key: float) -> None:
        """Set the key of `worker`."""
        if self._keys.get(worker.slot) != key:
            self.remove(worker)
            self._keys[worker.slot] = key
            insort(self._order, (key, worker.slot, worker))

    def remove(self, worker: WorkerState) -> None:
        """Remove `worker` if it is ranked."""
        old = self._keys.pop(worker.slot, None)
        if old is not None:
            del self._order[bisect_left(self._order, (old, worker.slot))]


class IncompatiblePairs:
    """Pairs of workers that rejected each other: other releases, models or KV settings, as in a rolling update.

    A worker that registers again is another run, of which nothing is known.
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
        known = self._pairs.get((prefill, decode))
        return known is None or known[0] <= self._clock()

    def forget_old(self) -> bool:
        """Forget expired pairs; return True if there were any."""
        before = len(self._pairs)
        self._pairs = {pair: known for pair, known in self._pairs.items() if known[0] > self._clock()}
        return len(self._pairs) < before

    def forget(self, peer: PeerRef) -> None:
        """Forget the pairs of a run that is over."""
        self._pairs = {pair: known for pair, known in self._pairs.items() if peer not in pair}

    def why(self, prefills: Iterable[PeerRef], decodes: Iterable[PeerRef]) -> str:
        """Return the reason of the first rejection between these; "" without one."""
        those = set(decodes)
        known = (self._pairs.get((prefill, decode)) for prefill in prefills for decode in those)
        return next((each[1] for each in known if each is not None), "")


class Fleet(LoadObserver):
    """Workers `join` and `leave`; their states notify it when their load has changed."""

    def __init__(self) -> None:
        self.prefixes = PrefixIndex()
        self.incompatible = IncompatiblePairs()
        self.prefills = Ranking()
        """Workers that prefill, by the prompt tokens that wait there."""
        self.decodes = Ranking()
        """Workers that decode, by `step seconds / free share of pages`."""
        self._live: dict[PeerRef, WorkerState] = {}
        self._by_slot: dict[int, WorkerState] = {}
        self._free_slots: list[int] = []
        self._both: set[int] = set()
        self.changes = 0
        """The number of times that workers came, went, changed or became compatible again."""

    @property
    def live(self) -> Collection[WorkerState]:
        """The live workers, in no order."""
        return self._live.values()

    def worker(self, slot: int) -> WorkerState | None:
        """Return the live worker with this number in the prefix index, None if it is not live."""
        worker = self._by_slot.get(slot)
        return worker if worker is not None and worker.live else None

    @property
    def both_roles(self) -> int:
        """The number of live workers with both roles."""
        return len(self._both)

    def join(self, worker: WorkerState) -> None:
        """Give `worker` a number. It is not live before `set_live`."""
        worker.slot = heapq.heappop(self._free_slots) if self._free_slots else len(self._by_slot)
        worker.observer = self
        self._by_slot[worker.slot] = worker
        self.prefixes.open(worker.slot, worker.pages_total)

    def leave(self, worker: WorkerState) -> None:
        """Remove `worker` and what it held."""
        self.set_live(worker, live=False)
        worker.observer = None
        self.prefixes.drop(worker.slot)
        self.incompatible.forget(worker.peer)
        del self._by_slot[worker.slot]
        heapq.heappush(self._free_slots, worker.slot)

    def forget_old_incompatible(self) -> None:
        """Forget pairs whose rejection is long ago. Called periodically."""
        if self.incompatible.forget_old():
            self.changes += 1

    def set_live(self, worker: WorkerState, *, live: bool) -> None:
        """Set whether `worker` takes new work; called again when its facts have changed."""
        self.changes += 1
        worker.live = live
        if live:
            self._live[worker.peer] = worker
        else:
            self._live.pop(worker.peer, None)
        if live and worker.prefills and worker.decodes:
            self._both.add(worker.slot)
        else:
            self._both.discard(worker.slot)
        self.prompts_changed(worker)
        self.answers_changed(worker)

    def prompts_changed(self, worker: WorkerState) -> None:
        """Rank `worker` for prefill again. Its decode rows count as well: a prompt there delays them."""
        if worker.live and worker.prefills:
            self.prefills.put(worker, worker.prefill_tokens + worker.decode_requests)
        else:
            self.prefills.remove(worker)

    def answers_changed(self, worker: WorkerState) -> None:
        """Rank `worker` for decoding again."""
        if worker.live and worker.decodes:
            free = 1.0 - worker.pages_used / worker.pages_total
            self.decodes.put(worker, max(worker.step_s, worker.idle_step_s) / free if free > 0 else math.inf)
        else:
            self.decodes.remove(worker)
        if worker.prefills and worker.decodes:
            self.prompts_changed(worker)
