"""The live workers, as placement sees them: who they are, in which order to ask them, and what they hold."""

import heapq
import math
from collections.abc import Collection

from router.misfits import Misfits
from router.prefix_index import PrefixIndex
from router.ranking import Ranking
from router.worker_books import Order, WorkerBooks
from wire.ending import pages_for
from wire.messages import PeerRef
from wire.timeline import TransferStats


class Fleet(Order):
    """Workers `join` and `leave`; their books say themselves when their place in the order has changed."""

    def __init__(self) -> None:
        self.prefixes = PrefixIndex()
        self.misfits = Misfits()
        self.prefills = Ranking()
        """Workers whose prefill half is open, the one with the least to compute first."""
        self.decodes = Ranking()
        """Workers whose decode half is open, the one whose steps are shortest first."""
        self._live: dict[PeerRef, WorkerBooks] = {}
        self._by_slot: dict[int, WorkerBooks] = {}
        self._free_slots: list[int] = []
        self._both: set[int] = set()
        self._page_bytes = 0
        self.changes = 0
        """How often workers came, went or changed, or may serve together again."""

    @property
    def live(self) -> Collection[WorkerBooks]:
        """All of them, in no order."""
        return self._live.values()

    def worker(self, slot: int) -> WorkerBooks | None:
        """The live worker with this number in the prefix index, None if it is not live."""
        worker = self._by_slot.get(slot)
        return worker if worker is not None and worker.live else None

    @property
    def colocates(self) -> bool:
        """Whether any live worker has both halves open."""
        return bool(self._both)

    def kv_bytes(self, tokens: int, page_tokens: int) -> int:
        """Bytes of the pages that hold `tokens`; 0 until a transfer has told how large a page is."""
        return pages_for(tokens, page_tokens) * self._page_bytes

    def learn_transfer(self, receiver: WorkerBooks, transfer: TransferStats) -> None:
        """A transfer to `receiver` has ended."""
        receiver.transfer.observe(transfer)
        if transfer.pages and transfer.bytes:
            self._page_bytes = transfer.bytes // transfer.pages

    def join(self, worker: WorkerBooks) -> None:
        """Give it a number. It is not live before `set_live`."""
        worker.slot = heapq.heappop(self._free_slots) if self._free_slots else len(self._by_slot)
        worker.order = self
        self._by_slot[worker.slot] = worker
        self.prefixes.open(worker.slot, worker.pages_total)

    def leave(self, worker: WorkerBooks) -> None:
        """It is gone, and so is what it held."""
        self.set_live(worker, live=False)
        worker.order = None
        self.prefixes.drop(worker.slot)
        self.misfits.forget(worker.peer)
        del self._by_slot[worker.slot]
        heapq.heappush(self._free_slots, worker.slot)

    def forget_old_misfits(self) -> None:
        """Called now and then."""
        if self.misfits.forget_old():
            self.changes += 1

    def set_live(self, worker: WorkerBooks, *, live: bool) -> None:
        """Whether it takes new work; a worker whose facts have changed is looked at again."""
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
        self.rank_prompts(worker)
        self.rank_answers(worker)

    def rank_prompts(self, worker: WorkerBooks) -> None:
        if worker.live and worker.prefills:
            # The rows count where both halves are open: a prompt there keeps them waiting.
            self.prefills.put(worker, worker.prefill_tokens + worker.decode_requests)
        else:
            self.prefills.remove(worker)

    def rank_answers(self, worker: WorkerBooks) -> None:
        if worker.live and worker.decodes:
            free = 1.0 - worker.pages_used / worker.pages_total
            self.decodes.put(worker, max(worker.step_s, worker.idle_step_s) / free if free > 0 else math.inf)
        else:
            self.decodes.remove(worker)
        if worker.prefills and worker.decodes:
            self.rank_prompts(worker)
