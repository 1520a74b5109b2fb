"""What must hold, looked at from outside: who owns which page, and whose KV is in it."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.batch import StepRow
from engine.cache.page_checksums import page_checksums
from engine.cache.page_pool import PagePool
from kv_transfer.layout import KVLayout
from tests.fake_engine import PAGE_TOKENS, FakeEngine
from wire.messages import Lease, RequestRef


class Broken(AssertionError):
    """Something that must hold does not."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The state of a page, and the attempt it is in that state for."""

    state: str
    ref: RequestRef | None = None


class Stamps:
    """A number for each attempt at each request, to be written beside the KV it computed."""

    def __init__(self) -> None:
        self._numbers: dict[RequestRef, int] = {}

    def of(self, ref: RequestRef) -> int:
        return self._numbers.setdefault(ref, len(self._numbers) + 1)


def holder_of(pool: PagePool, page: int) -> Holder:
    """Who has this page now."""
    for ref, pages in pool._owned.items():
        if page in pages:
            return Holder("owned", ref)
    for state, leases in (("advertised", pool._advertised), ("quarantined", pool._quarantined)):
        for lease, held in leases.items():
            if page in held:
                return Holder(state, ref_of(lease))
    return Holder("shared" if page in pool._shared else "free")


def ref_of(lease: Lease) -> RequestRef:
    return RequestRef(lease.request_id, lease.attempt)


class WatchedEngine(FakeEngine):
    """Computes in pages of one attempt alone, and reads nothing that another attempt computed."""

    def __init__(self, pages: int, stamps: Stamps, *, asynchronous: bool) -> None:
        super().__init__(pages)
        self.asynchronous = asynchronous
        self.memory = np.zeros((pages + 1, PAGE_TOKENS, 2), dtype="<i4")
        """The last page is nobody's: a connection is tried out with it."""
        self.layout = KVLayout(self.memory.ctypes.data, pages + 1, 1, 1, PAGE_TOKENS, 1, 4, "int32")
        self.page_sums = page_checksums(torch.from_numpy(self.memory).view(-1, 1, 1, 1, PAGE_TOKENS, 2))
        self._stamps = stamps

    def _row(self, row: StepRow) -> int | None:
        end = row.start + len(row.token_ids)
        pages = row.page_ids[: -(-end // PAGE_TOKENS)]
        stamp = self._stamps.of(self._owner(pages))
        for position in range(row.start, end):
            self.memory[pages[position // PAGE_TOKENS], position % PAGE_TOKENS, 1] = stamp
        read = [int(self.memory[pages[p // PAGE_TOKENS], p % PAGE_TOKENS, 1]) for p in range(end)]
        if set(read) != {stamp}:
            raise Broken(f"a step of attempt {stamp} reads KV of attempts {sorted(set(read))}")
        return super()._row(row)

    def _owner(self, pages: Sequence[int]) -> RequestRef:
        holders = {holder_of(self.pool, page) for page in pages}
        (holder, *others) = holders
        # A local prefill writes where its own decode half lets it, as a prefill worker elsewhere does.
        if others or holder.ref is None:
            raise Broken(f"a step computes in pages that are {holders}")
        return holder.ref


class Alarms(logging.Handler):
    """Errors that the code under test logged and went on after. `expected` are loggers whose errors are right."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.heard: list[str] = []
        self.expected: set[str] = {"decode_worker.room"}

    def emit(self, record: logging.LogRecord) -> None:
        if record.name in self.expected:
            return
        self.heard.append(f"{record.getMessage()} {record.exc_info[1]!r}" if record.exc_info else record.getMessage())
