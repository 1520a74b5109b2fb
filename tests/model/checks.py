"""Invariants that are checked from outside the code under test: the owner of each page and the origin of its KV."""

import logging
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kv_transfer.layout import KVLayout
from tandem.engine.cache.page_checksums import page_checksums
from tandem.engine.cache.page_pool import PagePool
from tandem.engine.cache.paged_cache import kernel_view
from tandem.engine.config.kv import KvGroup
from tandem.engine.kernels.kv_cache import SCALE_BYTES
from tandem.engine.steps.batch import StepRow
from tandem.protocol.kv_pages import STATE
from tandem.protocol.messages import Lease, RequestRef
from tests.fake_engine import PAGE_TOKENS, FakeEngine


class Broken(AssertionError):
    """Raised when an invariant does not hold."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The state of a page, and the attempt of a request that holds the page in this state."""

    state: str
    ref: RequestRef | None = None


FIRST_STAMP = 1
STEP_TOKENS = 6
"""The maximum prompt tokens of a step."""
TOKEN_BYTES = 4
"""Bytes of a token id, which is stored as the codes of 8-bit KV."""


def next_stamp(stamp: int, token: int) -> int:
    """Return the stamp stored with the KV of `token`, given the previous token's stamp.

    Like keys and values, a stamp depends on all previous tokens.
    """
    return zlib.crc32(b"%d %d" % (stamp, token)) >> 1


def holder_of(pool: PagePool, page: int) -> Holder:
    """Return the state of a page in the pool, with the attempt that holds it."""
    for ref, pages in pool._owned.items():
        if page in pages:
            return Holder("owned", ref)
    for state, leases in (("advertised", pool._advertised), ("quarantined", pool._quarantined)):
        for lease, held in leases.items():
            if page in held:
                return Holder(state, ref_of(lease))
    return Holder("shared" if page in pool._shared else "cached" if page in pool._cached else "free")


def ref_of(lease: Lease) -> RequestRef:
    return RequestRef(lease.request_id, lease.attempt)


class WatchedEngine(FakeEngine):
    """A fake engine that checks its accesses to pages.

    A step may write only to pages of its own attempt, and may read only these and shared pages whose KV belongs to the
    same prefix.
    """

    step_tokens = STEP_TOKENS
    quantized = True
    """True = pages have the form of 8-bit KV: the four bytes of a token id are codes, and its stamp is the scale."""

    def __init__(self, pages: int, *, asynchronous: bool) -> None:
        super().__init__(pages)
        self.asynchronous = asynchronous
        dtype = torch.int8 if self.quantized else torch.int32
        page_shape = (2, PAGE_TOKENS) if self.quantized else (PAGE_TOKENS, 2)
        self.stored = np.zeros((pages + 1, *page_shape), dtype="<i4")
        """The memory of all pages. The last page belongs to no request; transfers that test a connection use it."""
        self.memory = self.stored.swapaxes(1, 2) if self.quantized else self.stored
        group = KvGroup((0,), 1, 1, (TOKEN_BYTES if self.quantized else 2,))
        cache = kernel_view(torch.from_numpy(self.stored).view(pages + 1, -1).view(dtype), group, PAGE_TOKENS)
        scale_bytes = SCALE_BYTES if self.quantized else 0
        self.layout = KVLayout(
            self.stored.ctypes.data, pages + 1, 1, 1, PAGE_TOKENS, group.dims, dtype.itemsize,
            str(dtype).removeprefix("torch."), scale_bytes=scale_bytes,
        )  # fmt: skip
        assert self.layout.total_bytes == self.stored.nbytes
        self.page_sums = page_checksums(*[cache] * len(self.windows))
        self.seen: Counter[str] = Counter()

    def _row(self, row: StepRow) -> int | None:
        kv, end = self.kv_pages, row.start + len(row.token_ids)
        stamps: list[int] = []
        for group in range(kv.groups):
            pages = row.page_ids[group :: kv.groups][: kv.numbers(end)]
            if kv.windows[group] == STATE:
                self._check_read(
                    pages[(row.start - 1) // PAGE_TOKENS :][:1] if row.start else [], self._owner(pages[-1:])
                )
                self.seen["states"] += row.start > 0
                continue
            first, first_written = kv.first(group, row.start), row.start // PAGE_TOKENS
            self._check_read(pages[first:first_written], self._owner(pages[first_written:]))
            stamps = self._read(pages, first * PAGE_TOKENS, row.start, stamps)
            self.seen["pages behind windows"] += first
            stamp = stamps[-1]
            for position, token in enumerate(row.token_ids, row.start):
                stamp = next_stamp(stamp, token)
                self.memory[pages[position // PAGE_TOKENS], position % PAGE_TOKENS, 1] = stamp
        return super()._row(row)

    def _read(self, pages: Sequence[int], first: int, end: int, known: Sequence[int]) -> list[int]:
        """Return the stamps before each position up to `end`.

        The stamps from `first` on are checked against the tokens. The first group of layers has no window, so the
        tokens that it stores are `known` when the other groups are checked.
        """
        stamps = list(known) or [FIRST_STAMP]
        for position in range(first, end):
            token, actual = self.memory[pages[position // PAGE_TOKENS], position % PAGE_TOKENS].tolist()
            stamp = next_stamp(stamps[position], token)
            if not known:
                stamps.append(stamp)
            if actual != stamp or stamp != stamps[position + 1]:
                page = pages[position // PAGE_TOKENS]
                raise Broken(f"a step reads KV of another prefix at {position}, page {page}")
        return stamps

    def _owner(self, pages: Sequence[int]) -> Holder:
        """Return the holder of the pages that a step writes to."""
        holders = {holder_of(self.pool, page) for page in pages}
        (holder, *others) = holders
        # A local prefill writes to pages reserved by the decode scheduler of its own process, as a remote prefill
        # worker does.
        if others or holder.ref is None:
            raise Broken(f"a step computes in pages that are {holders}")
        return holder

    def _check_read(self, pages: Sequence[int], owner: Holder) -> None:
        """Check that each page is shared or belongs to the attempt itself."""
        for page in pages:
            holder = holder_of(self.pool, page)
            self.seen[f"reads {holder.state}"] += 1
            if holder not in (owner, Holder("shared")):
                raise Broken(f"a step of {owner} reads a page that is {holder}")


class Alarms(logging.Handler):
    """Collects errors that the code under test logged and then ignored.

    Errors of the loggers in `expected` are correct behaviour.
    """

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.errors: list[str] = []
        self.expected: set[str] = {"kv_transfer.lost_pages"}

    def emit(self, record: logging.LogRecord) -> None:
        if record.name in self.expected:
            return
        self.errors.append(f"{record.getMessage()} {record.exc_info[1]!r}" if record.exc_info else record.getMessage())
