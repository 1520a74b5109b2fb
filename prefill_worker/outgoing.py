"""The writes of one hand-over, from their posts until nothing of them moves any more."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from kv_transfer.base import PageWrite, Sender, WriteDone
from prefill_worker.writing import WritingTime
from wire.errors import TransferFailed
from wire.messages import PeerRef, TransferNotice
from wire.timeline import Edge, EdgeStamp


class OutgoingWrites:
    """In the order they were posted; belongs to its handoff, which frees the pages. Lives on the event loop."""

    def __init__(self, sender: Sender, deadline_s: float, writing: WritingTime) -> None:
        self._sender = sender
        self._deadline_s = deadline_s
        self._writing = writing
        self._under_way = 0
        self._posted: list[Future[WriteDone]] = []
        self._awaited: list[asyncio.Future[WriteDone]] = []
        """The same, for whoever waits on this loop."""
        self._before_last_chunk = 0
        self._notice_made: tuple[EdgeStamp, ...] = ()

    def last_chunk_ended(self) -> None:
        """What is posted from now on is what the request waits for."""
        self._before_last_chunk = len(self._posted)

    def post(
        self,
        peer: PeerRef,
        here: Sequence[int],
        there: Sequence[int],
        begin_by: Callable[[], float],
        notice: TransferNotice | None = None,
    ) -> None:
        """Write pages `here` onto those `there`; those with the notice behind all others."""
        behind = () if notice is None else tuple(self._posted)
        if notice is not None:
            self._notice_made = (EdgeStamp.now(Edge.NOTICE_MADE),)
        write = PageWrite(peer, here, there, notice, begin_by, behind)
        self._posted.append(self._sender.write(write, self._deadline_s))
        self._awaited.append(asyncio.wrap_future(self._posted[-1]))
        if not self._under_way:
            self._writing.begin()
        self._under_way += 1
        self._awaited[-1].add_done_callback(self._settled)

    def raise_failed(self) -> None:
        """The oldest failure, if there is any yet."""
        for write in self._awaited:
            if write.done():
                write.result()

    async def landed(self) -> None:
        """Wait until all of them have settled; the failure of the oldest that has failed is raised.

        One that moves no more cannot be taken back, but nobody waits longer for it than for its deadline: the router
        hears TransferFailed and goes on elsewhere, while the handoff keeps the pages until `quiet`.
        """
        # Not gather: a cancelled wait must leave the writes to `quiet`, which waits for them again.
        _, moving = await asyncio.wait(self._awaited, timeout=self._deadline_s)
        self.raise_failed()
        if moving:
            raise TransferFailed(f"pages were not written within {self._deadline_s:g} s; prefill again elsewhere")

    @property
    def in_doubt(self) -> bool:
        """Whether any has not landed whole. One that failed is quiet here, but what a broken connection had taken may
        lie at the peer and land when that looks.
        """
        return any(not write.done() or write.exception() is not None for write in self._posted)

    @property
    def moving(self) -> bool:
        """Whether any still reads pages here."""
        return not all(write.done() for write in self._awaited)

    async def quiet(self) -> None:
        """Wait until none of them reads a page here or has the network take more of it, however each ended."""
        if self._awaited:
            settled, _ = await asyncio.wait(self._awaited)
            for write in settled:
                write.exception()  # looked at, or asyncio logs each failure that came after an abort or another one

    def moved(self) -> tuple[int, int]:
        """Bytes and nanoseconds of writes that have all landed, together."""
        done = [write.result() for write in self._awaited]
        return sum(each.bytes for each in done), sum(each.duration_nanos for each in done)

    def edges(self) -> tuple[EdgeStamp, ...]:
        """Of writes that have all landed, the last of them with the notice."""
        done = [write.result() for write in self._awaited]
        return (
            EdgeStamp(Edge.TRANSFER_STARTED, done[0].begun_nanos),
            EdgeStamp(Edge.LAST_PAGES_POSTED, done[self._before_last_chunk].begun_nanos),
            *self._notice_made,
            EdgeStamp(Edge.NOTICE_POSTED, done[-1].begun_nanos),
            EdgeStamp(Edge.TRANSFER_FINISHED, done[-1].ended_nanos),
        )

    def _settled(self, _: asyncio.Future[WriteDone]) -> None:
        self._under_way -= 1
        if not self._under_way:
            self._writing.end()
