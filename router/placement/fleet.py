"""The live workers in the order in which placement considers them, and what they are known to hold and to reject."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import product
from operator import attrgetter

from router.placement.prefix_index import PrefixIndex
from router.placement.worker_state import WorkerState
from wire.messages import PeerRef

REMEMBERED_S = 300.0
"""The time for which a pair counts as incompatible; it bounds the harm of an accidental rejection."""


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
        return (prefill, decode) not in self._pairs

    def forget_old(self) -> bool:
        """Forget expired pairs; return True if there were any. Called periodically."""
        before = len(self._pairs)
        self._pairs = {pair: known for pair, known in self._pairs.items() if known[0] > self._clock()}
        return len(self._pairs) < before

    def forget(self, peer: PeerRef) -> None:
        """Forget the pairs of a run that is over."""
        self._pairs = {pair: known for pair, known in self._pairs.items() if peer not in pair}

    def why(self, prefills: Iterable[PeerRef], decodes: Iterable[PeerRef]) -> str:
        """Return the reason of the first rejection between these; "" without one."""
        known = (self._pairs.get(pair) for pair in product(prefills, decodes))
        return next((each[1] for each in known if each is not None), "")


class Fleet:
    """Workers `join` and `leave`, and are live between."""

    def __init__(self) -> None:
        self.prefixes = PrefixIndex()
        self.incompatible = IncompatiblePairs()
        self._live: dict[PeerRef, WorkerState] = {}
        self._by_slot: dict[int, WorkerState] = {}
        self._free_slots: list[int] = []
        self._prefills: list[WorkerState] = []
        self._decodes: list[WorkerState] = []
        self.both_roles = 0
        """The number of live workers with both roles."""
        self.changes = 0
        """The number of times that workers came, went, changed or became compatible again."""

    @property
    def live(self) -> Collection[WorkerState]:
        """The live workers, in no order."""
        return self._live.values()

    @property
    def prefills(self) -> Sequence[WorkerState]:
        """The live workers that prefill, by the prompt tokens that wait there; the next call may change the order."""
        self._prefills.sort(key=attrgetter("prompt_rank"))
        return self._prefills

    @property
    def decodes(self) -> Sequence[WorkerState]:
        """The live workers that decode, by `step seconds / free share of pages`; the next call may change the order."""
        self._decodes.sort(key=attrgetter("answer_rank"))
        return self._decodes

    def worker(self, slot: int) -> WorkerState | None:
        """Return the live worker with this number in the prefix index, None if it is not live."""
        worker = self._by_slot.get(slot)
        return worker if worker is not None and worker.live else None

    def join(self, worker: WorkerState) -> None:
        """Give `worker` a number. It is not live before `set_live`."""
        worker.slot = heapq.heappop(self._free_slots) if self._free_slots else len(self._by_slot)
        self._by_slot[worker.slot] = worker
        self.prefixes.open(worker.slot, worker.info.pages_total)

    def leave(self, worker: WorkerState) -> None:
        """Remove `worker` and what it held."""
        self.set_live(worker, live=False)
        self.prefixes.drop(worker.slot)
        self.incompatible.forget(worker.peer)
        del self._by_slot[worker.slot]
        heapq.heappush(self._free_slots, worker.slot)

    def forget_old_incompatible(self) -> None:
        """Forget pairs whose rejection is long ago. Called periodically."""
        self.changes += self.incompatible.forget_old()

    def set_live(self, worker: WorkerState, *, live: bool) -> None:
        """Set whether `worker` takes new work; called again when its facts have changed."""
        self.changes += 1
        worker.live = live
        worker.refresh()
        if live:
            self._live[worker.peer] = worker
        else:
            self._live.pop(worker.peer, None)
        self._prefills = [each for each in self.live if each.prefills]
        self._decodes = [each for each in self.live if each.decodes]
        self.both_roles = sum(each.decodes for each in self._prefills)
