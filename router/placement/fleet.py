"""The workers of the router, sorted for placement, with their cached prefixes, and the pairs that are incompatible.

Workers are kept sorted by load, so that placement reads its few candidates without scanning the fleet.
"""

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
"""The time for which a pair counts as incompatible, in seconds; it limits the effect of an accidental rejection."""
Rank = tuple[bool, float]
"""A sort key: True if the worker is full, then the worker's load."""


class Ranking:
    """Workers sorted by `Rank`, full ones last. Moving a worker takes microseconds, even in a large fleet."""

    def __init__(self) -> None:
        self._order: list[tuple[Rank, int, WorkerState]] = []
        self._keys: dict[int, Rank] = {}

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[WorkerState]:
        """Iterate over all workers from the smallest key; the ranking must not change during the iteration."""
        return map(itemgetter(2), self._order)

    def with_capacity(self) -> Iterator[WorkerState]:
        """Iterate over the workers that are not full, from the smallest key."""
        return map(itemgetter(2), takewhile(lambda entry: not entry[0][0], self._order))

    def put(self, worker: WorkerState, key: Rank | None) -> None:
        """Set the key of `worker`; None removes the worker."""
        old = self._keys.get(worker.slot)
        if old == key:
            return
        if old is not None:
            del self._order[bisect_left(self._order, (old, worker.slot))], self._keys[worker.slot]
        if key is not None:
            insort(self._order, (key, worker.slot, worker))
            self._keys[worker.slot] = key


class IncompatiblePairs:
    """Pairs of workers that rejected each other because of different releases, models or KV settings.

    Such pairs occur during a rolling update. A pair names two worker processes (`PeerRef`), so it no longer
    applies once one of the workers has restarted.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pairs: dict[tuple[PeerRef, PeerRef], tuple[float, str]] = {}

    def __len__(self) -> int:
        return len(self._pairs)

    def learn(self, prefill: PeerRef, decode: PeerRef, why: str) -> None:
        """Add a pair that rejected each other for the reason `why`; it expires after `REMEMBERED_S`."""
        self._pairs[prefill, decode] = self._clock() + REMEMBERED_S, why

    def fit(self, prefill: PeerRef, decode: PeerRef) -> bool:
        """Return False if the two workers are known to be incompatible, else True."""
        return (prefill, decode) not in self._pairs

    def forget_old(self) -> bool:
        """Remove expired pairs; return True if any pair was removed. Called periodically."""
        before = len(self._pairs)
        self._pairs = {pair: known for pair, known in self._pairs.items() if known[0] > self._clock()}
        return len(self._pairs) < before

    def why(self, prefills: Iterable[PeerRef], decodes: Iterable[PeerRef]) -> str:
        """Return the reason of the first known rejection between one of `prefills` and one of `decodes`; "" if none."""
        known = (self._pairs.get(pair) for pair in product(prefills, decodes))
        return next((entry[1] for entry in known if entry is not None), "")


class Fleet:
    """All workers that this router knows; a worker can be live (take new work) only between `join` and `leave`.

    The `WorkerPool` owns it; all calls come on the event loop.
    """

    def __init__(self) -> None:
        self.prefixes = PrefixIndex()
        self.incompatible = IncompatiblePairs()
        self.live: list[WorkerState] = []
        """The live workers, unsorted."""
        self._by_slot: dict[int, WorkerState] = {}
        self._free_slots: list[int] = []
        self.prefills = Ranking()
        """The live workers that take prompts, sorted by their number of waiting prompt tokens plus decode rows."""
        self.decodes = Ranking()
        """The live workers that take answers, sorted by decode step time ÷ free share of the pages."""
        self.both_roles = 0
        """Number of live workers that have both roles."""
        self.changes = 0
        """A counter that increases when a worker joins, leaves or changes, and when an incompatible pair expires."""

    @property
    def prefill_capacity(self) -> int:
        """Number of tokens whose KV fits into the largest live prefill worker; 0 if there is none."""
        return max((worker.kv_tokens_total for worker in self.live if worker.prefills), default=0)

    def worker(self, slot: int) -> WorkerState | None:
        """Return the worker with slot number `slot` in the prefix index; None if it is not live."""
        worker = self._by_slot.get(slot)
        return worker if worker is not None and worker.live else None

    def join(self, worker: WorkerState) -> None:
        """Add `worker` and give it the lowest free slot; it takes no work before `set_live`."""
        worker.slot = heapq.heappop(self._free_slots) if self._free_slots else len(self._by_slot)
        self._by_slot[worker.slot], worker.on_change = worker, self.rank
        states = worker.info.kv_pages.state_groups > 0
        self.prefixes.open(worker.slot, worker.info.pages_total + worker.info.kv_tier_pages, states=states)

    def leave(self, worker: WorkerState) -> None:
        """Remove `worker` and its pages in the prefix index; its slot becomes free."""
        self.set_live(worker, live=False)
        worker.on_change = None
        self.prefixes.drop(worker.slot)
        del self._by_slot[worker.slot]
        heapq.heappush(self._free_slots, worker.slot)

    def set_live(self, worker: WorkerState, *, live: bool) -> None:
        """Set whether `worker` takes new work; also called after every change of the worker's registration."""
        self.changes += 1
        worker.live = live
        self.prefixes.limit(worker.slot, worker.info.pages_total + worker.info.kv_tier_pages)
        self.live = [member for member in self._by_slot.values() if member.live]
        self.both_roles = sum(member.prefills and member.decodes for member in self.live)
        worker.refresh()

    def rank(self, worker: WorkerState) -> None:
        """Update the place of `worker` in both rankings; it is removed from a ranking whose work it does not take."""
        self.prefills.put(worker, worker.prompt_rank if worker.live and worker.prefills else None)
        self.decodes.put(worker, worker.answer_rank if worker.live and worker.decodes else None)
