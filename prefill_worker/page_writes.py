"""The page writes of a hand-over, the checksums of the sent pages, and the time spent writing."""

import asyncio
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from kv_transfer.base import PageWrite, Sender, WriteDone
from kv_transfer.checksums import PageChecks
from prefill_worker.write_window import WriteWindow
from tandem.protocol.errors import TransferFailed
from tandem.protocol.kv_pages import KvPages
from tandem.protocol.lifecycle.events import EventTime, LifecycleEvent
from tandem.protocol.messages import Lease, PageChecksum, PeerRef, TransferNotice


class WritingTime:
    """The time in which hand-overs have writes in progress, summed over the hand-overs. May be called from any thread.

    There is no timer: the sum is updated when a hand-over starts or stops writing, and when the sum is read. The time
    of a write that never ends counts as well.
    """

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        self._writing = 0
        self._nanos, self._until = 0, clock_ns()

    def begin(self) -> None:
        """Record that a hand-over without a write in progress has posted one."""
        self._update(1)

    def end(self) -> None:
        """Record that a hand-over no longer has a write in progress; called when its last posted write has ended."""
        self._update(-1)

    @property
    def seconds(self) -> float:
        """The sum so far, in seconds. It never decreases."""
        return self._update(0) / 1e9

    def _update(self, begun: int) -> int:
        with self._lock:
            now = self._clock_ns()
            self._nanos += self._writing * (now - self._until)
            self._until = now
            self._writing += begun
            return self._nanos


class OutgoingWrites:
    """The writes of one hand-over, in the order in which they were posted.

    Owned by the hand-over, which frees the pages when no write is in progress. Used on the event loop.
    """

    def __init__(self, sender: Sender, deadline_s: float, writing: WritingTime) -> None:
        self._sender = sender
        self._deadline_s = deadline_s
        self._writing = writing
        self._in_progress = 0
        self._posted: list[Future[WriteDone]] = []
        self._awaited: list[asyncio.Future[WriteDone]] = []
        """The futures of `_posted` as asyncio futures."""
        self._before_last_chunk = 0
        self._notice_made: tuple[EventTime, ...] = ()

    def last_chunk_ended(self) -> None:
        """Record that the whole prompt is computed; LAST_PAGES_POSTED is the time of the next posted write."""
        self._before_last_chunk = len(self._posted)

    def post(
        self,
        peer: PeerRef,
        here: Sequence[int],
        there: Sequence[int],
        begin_by: Callable[[], float],
        notice: TransferNotice | None = None,
        *,
        groups: Sequence[int],
    ) -> None:
        """Write the local pages `here`, of these groups of layers, to the pages `there` of `peer`.

        The write does not begin after the time that `begin_by` returns. A write with a notice begins after all other
        writes have landed.
        """
        after = () if notice is None else tuple(self._posted)
        if notice is not None:
            self._notice_made = (EventTime.now(LifecycleEvent.NOTICE_MADE),)
        write = PageWrite(peer, here, there, notice, begin_by, after, groups)
        self._posted.append(self._sender.write(write, self._deadline_s))
        self._awaited.append(asyncio.wrap_future(self._posted[-1]))
        if not self._in_progress:
            self._writing.begin()
        self._in_progress += 1
        self._awaited[-1].add_done_callback(self._settled)

    def raise_failed(self) -> None:
        """Raise the error of the oldest failed write, if any write has failed yet."""
        for write in self._awaited:
            if write.done():
                write.result()

    async def completed(self) -> None:
        """Wait until all writes have ended, and raise the error of the oldest failed write, if any.

        Raises TransferFailed if a write exceeds its deadline. The router then retries with other workers, while the
        hand-over keeps the pages until `quiescent`, because a stalled write cannot be cancelled.
        """
        # Not gather: if this wait is cancelled, the writes must continue, and `quiescent` waits for them again.
        _, moving = await asyncio.wait(self._awaited, timeout=self._deadline_s)
        self.raise_failed()
        if moving:
            raise TransferFailed(f"pages were not written within {self._deadline_s:g} s; prefill again elsewhere")

    @property
    def in_doubt(self) -> bool:
        """True if any write is in progress or has failed.

        A failed write no longer reads pages of this worker, but data that a broken connection had accepted may still
        land at the peer later.
        """
        return any(not write.done() or write.exception() is not None for write in self._posted)

    @property
    def in_progress(self) -> bool:
        """True if any write still reads pages of this worker."""
        return not all(write.done() for write in self._awaited)

    async def quiescent(self) -> None:
        """Wait until every write has ended, with or without success, so that none reads a page of this worker."""
        if self._awaited:
            done, _ = await asyncio.wait(self._awaited)
            for write in done:
                write.exception()  # retrieved, or asyncio logs each failure that came after an abort or another failure

    def moved(self) -> tuple[int, int]:
        """Return the bytes and the duration in nanoseconds of all writes, summed. All of them must have landed."""
        done = [write.result() for write in self._awaited]
        return sum(write.bytes for write in done), sum(write.duration_nanos for write in done)

    def event_times(self) -> tuple[EventTime, ...]:
        """Return the lifecycle events of the writes.

        All of them must have landed, and the last one must have had the notice.
        """
        done = [write.result() for write in self._awaited]
        return (
            EventTime(LifecycleEvent.TRANSFER_STARTED, done[0].begun_nanos),
            EventTime(LifecycleEvent.LAST_PAGES_POSTED, done[self._before_last_chunk].begun_nanos),
            *self._notice_made,
            EventTime(LifecycleEvent.NOTICE_POSTED, done[-1].begun_nanos),
            EventTime(LifecycleEvent.TRANSFER_FINISHED, done[-1].ended_nanos),
        )

    def _settled(self, _: asyncio.Future[WriteDone]) -> None:
        self._in_progress -= 1
        if not self._in_progress:
            self._writing.end()


class OutgoingChecksums:
    """The checksums of some of a request's pages; the constructor chooses the pages.

    The computation of a checksum begins as soon as its page is final, so that the notice need not wait for it. Owned by
    the hand-over, which also owns the pages.
    """

    def __init__(self, checks: PageChecks | None, lease: Lease, prompt_tokens: int, skipped: int) -> None:
        """Choose the pages that get a checksum: some of the pages that are sent, or none if `checks` is None.

        The first `skipped` pages are not sent, nor are pages outside a sliding window.
        """
        self._checks = checks
        self._prompt_tokens = prompt_tokens
        self._chosen = () if checks is None else checks.chosen(lease, prompt_tokens, skipped)
        self._begun: list[Future[tuple[PageChecksum, ...]]] = []

    def begin(self, pages: Sequence[int], first: int, end: int) -> None:
        """Start to compute the checksums of those pages among `pages[first:end]` that were chosen for this request.

        These pages must be final, because the checksum thread reads them in place.
        """
        entries = [entry for entry in self._chosen if first <= entry < end]
        if self._checks is not None and entries:
            self._begun.append(self._checks.begin(pages, entries, self._prompt_tokens))

    async def all(self, deadline_s: float) -> tuple[PageChecksum, ...]:
        """Return the checksums with their page numbers, in the order in which they were begun.

        Raises the exception of the first computation that failed, and TransferFailed if computing them takes longer
        than `deadline_s` seconds from now.
        """
        sums: list[PageChecksum] = []
        try:
            async with asyncio.timeout(deadline_s):
                for begun in self._begun:
                    # The checksums of earlier chunks are ready; to await each would take a round of the event loop.
                    some = begun.result() if begun.done() else await asyncio.wrap_future(begun)
                    sums.extend(some)
        except TimeoutError:
            raise TransferFailed(
                f"checksums were not computed within {deadline_s:g} s; prefill again elsewhere"
            ) from None
        return tuple(sums)


@dataclass(frozen=True, slots=True)
class SentPages:
    """The pages of a prompt that are written to the pages of a lease, one to one."""

    writes: OutgoingWrites
    window: WriteWindow
    """The window of the lease, whose pages are those of `entries`."""
    kv: KvPages
    entries: Sequence[int]
    """The indices, ascending, of the sent pages in the prompt's page list (`KvPages.sent`)."""

    async def post(self, pages: Sequence[int], first: int, end: int, notice: TransferNotice | None = None) -> None:
        """Write the sent pages with numbers `first` to `end - 1`; `pages` is the prompt's page list.

        Raises the errors of `WriteWindow.ensure_open`.
        """
        groups = self.kv.groups
        some = slice(*(bisect_left(self.entries, number * groups) for number in (first, end)))
        there = (await self.window.pages())[some]
        await self.window.ensure_open()
        here = [pages[entry] for entry in self.entries[some]]
        orders = [entry % groups for entry in self.entries[some]]
        self.writes.post(self.window.destination.peer, here, there, self.window.closes_at, notice, groups=orders)
