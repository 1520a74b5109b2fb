"""The live workers, as placement sees them: which there are, in which order to ask them, and what they hold."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Collection, Iterator
from operator import itemgetter

from router.placement.incompatible_pairs import IncompatiblePairs
from router.placement.prefix_index import PrefixIndex
from router.placement.worker_state import LoadObserver, WorkerState
from wire.ending import pages_for
from wire.messages import PeerRef
from wire.tracing.timeline import TransferStats

_worker = itemgetter(2)


class Ranking:
    """Workers by a key, the smallest first. Moving one takes microseconds, however many there are."""

    def __init__(self) -> None:
        self._order: list[tuple[float, int, WorkerState]] = []
        self._keys: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[WorkerState]:
        """Must not be changed meanwhile."""
        return map(_worker, self._order)

    def put(self, worker: WorkerState, key: float) -> None:
        """`worker` has `key` from now on."""
        slot = worker.slot
        old = self._keys.get(slot)
        if old == key:
            return
        if old is not None:
            del self._order[bisect_left(self._order, (old, slot))]
        self._keys[slot] = key
        insort(self._order, (key, slot, worker))

    def remove(self, worker: WorkerState) -> None:
        """Nothing if it was not there."""
        old = self._keys.pop(worker.slot, None)
        if old is not None:
            del self._order[bisect_left(self._order, (old, worker.slot))]


class Fleet(LoadObserver):
    """Workers `join` and `leave`; their states notify it when their load has changed."""

    def __init__(self) -> None:
        self.prefixes = PrefixIndex()
        self.incompatible = IncompatiblePairs()
        self.prefills = Ranking()
        """Workers that take prompts, the one with the least to compute first."""
        self.decodes = Ranking()
        """Workers that take answers, the one with the shortest steps for its free pages first."""
        self._live: dict[PeerRef, WorkerState] = {}
        self._by_slot: dict[int, WorkerState] = {}
        self._free_slots: list[int] = []
        self._both: set[int] = set()
        self._page_bytes = 0
        self.changes = 0
        """How often workers came, went or changed, or became compatible again."""

    @property
    def live(self) -> Collection[WorkerState]:
        """All of them, in no order."""
        return self._live.values()

    def worker(self, slot: int) -> WorkerState | None:
        """The live worker with this number in the prefix index, None if it is not live."""
        worker = self._by_slot.get(slot)
        return worker if worker is not None and worker.live else None

    @property
    def both_roles(self) -> int:
        """How many live workers have both roles."""
        return len(self._both)

    @property
    def colocates(self) -> bool:
        """Whether any live worker has both roles."""
        return bool(self._both)

    def kv_bytes(self, tokens: int, page_tokens: int) -> int:
        """Bytes of the pages that hold `tokens`; 0 until a transfer has shown how large a page is."""
        return pages_for(tokens, page_tokens) * self._page_bytes

    def learn_transfer(self, receiver: WorkerState, transfer: TransferStats) -> None:
        """A transfer to `receiver` has ended."""
        receiver.transfer.observe(transfer)
        if transfer.pages and transfer.bytes:
            self._page_bytes = transfer.bytes // transfer.pages

    def join(self, worker: WorkerState) -> None:
        """Give it a number. It is not live before `set_live`."""
        worker.slot = heapq.heappop(self._free_slots) if self._free_slots else len(self._by_slot)
        worker.observer = self
        self._by_slot[worker.slot] = worker
        self.prefixes.open(worker.slot, worker.pages_total)

    def leave(self, worker: WorkerState) -> None:
        """It is gone, and so is what it held."""
        self.set_live(worker, live=False)
        worker.observer = None
        self.prefixes.drop(worker.slot)
        self.incompatible.forget(worker.peer)
        del self._by_slot[worker.slot]
        heapq.heappush(self._free_slots, worker.slot)

    def forget_old_incompatible(self) -> None:
        """Called now and then."""
        if self.incompatible.forget_old():
            self.changes += 1

    def set_live(self, worker: WorkerState, *, live: bool) -> None:
        """Whether it takes new work; call it again when the worker's facts have changed."""
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
        if worker.live and worker.prefills:
            # The decode rows count where a worker has both roles: a prompt there delays them.
            self.prefills.put(worker, worker.prefill_tokens + worker.decode_requests)
        else:
            self.prefills.remove(worker)

    def answers_changed(self, worker: WorkerState) -> None:
        if worker.live and worker.decodes:
            free = 1.0 - worker.pages_used / worker.pages_total
            self.decodes.put(worker, max(worker.step_s, worker.idle_step_s) / free if free > 0 else math.inf)
        else:
            self.decodes.remove(worker)
        if worker.prefills and worker.decodes:
            self.prompts_changed(worker)
