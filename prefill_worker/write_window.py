"""Write windows: the times until which a prompt's pages may be written to the decode worker, and their renewal.

A write is one-sided, so a decode worker that assumes this prefill worker dead cannot stop its writes. It relies on a
rule instead: the prefill worker begins no write after the window that was granted to it has closed, and the decode
worker does not reuse the pages before that time.

Windows are renewed before they close. One message to a decode worker renews all windows that it has granted. The
message is sent when a fraction RENEW_AT of the oldest window's duration has passed. So a pair of workers exchanges one
message per such period, however many prompts are handed over, and none if no hand-over takes that long.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType

from prefill_worker.decode_peers import DecodePeers
from tandem.protocol.errors import StaleEpoch, TandemError, TransferFailed
from tandem.protocol.messages import Destination, Lease, PeerRef

log = logging.getLogger(__name__)

RENEW_AT = 1 / 3
"""The fraction of a window's duration after which it is renewed; the reply must arrive within the same time.

One message may therefore be lost.
"""
MOST_LEASES = 1024
"""Maximum number of leases in one renewal message."""


class WriteWindow:
    """The write window of one lease, renewed for the length of a `with` block.

    The duration counts from before the request for the window was sent, so the window closes here before it closes at
    the decode worker. Owned by the hand-over; used on the event loop, except `closes_at`.
    """

    def __init__(self, peers: DecodePeers, renewals: WindowRenewals, destination: Destination, pages: int) -> None:
        """Create the window for a prompt that fills `pages` pages.

        Nothing may be written before `ensure_open` has returned.
        """
        self.destination = destination
        self.asked_at = self.ends_at = -math.inf
        """`asked_at`: the time of the request that last granted the window; `ends_at`: the end of the window.

        Both are times of `time.monotonic`.
        """
        self.over = False
        """True after the decode worker has reported that the lease has ended."""
        self._peers, self._renewals, self._pages = peers, renewals, pages
        self._remote: tuple[int, ...] | None = None

    def __enter__(self) -> WriteWindow:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._renewals.forget(self)

    @property
    def lease(self) -> Lease:
        """The lease under which the pages are written."""
        return self.destination.lease

    async def pages(self) -> tuple[int, ...]:
        """Return the decode worker's pages to which the prompt is written; they are requested once.

        Raises StaleEpoch if the lease has ended, Unavailable or DeadlineExceeded if there is no reply.
        """
        if self._remote is None:
            asked_at = time.monotonic()
            allotted = await self._peers.allocate_pages(self.destination, self._pages)
            self._remote = tuple(allotted.page_ids)
            self.extend(asked_at, allotted.write_for_s)
            self._renewals.watch(self)
        return self._remote

    async def ensure_open(self) -> float:
        """Wait until the window is open, and return the time at which it closes (`time.monotonic`).

        Windows are renewed in the background. This call renews the window only if that renewal failed, or if the
        process was stopped for a while. The caller must use the window at once. Raises the errors of `pages`, and
        TransferFailed if the reply took longer than the window lasts.
        """
        if not self.over and time.monotonic() >= self.ends_at:
            await self._renewals.renew(self.destination.peer)
        if self.over:
            raise StaleEpoch(f"{self.lease} has ended at {self.destination.peer.worker_id}; drop this attempt")
        if time.monotonic() >= self.ends_at:
            peer = self.destination.peer.worker_id
            raise TransferFailed(f"{peer} took too long to say that its pages may be written; prefill again elsewhere")
        return self.ends_at

    def closes_at(self) -> float:
        """Return the time until which a write may begin (`time.monotonic`); it moves when the window is renewed.

        May be called from any thread.
        """
        return -math.inf if self.over else self.ends_at

    def extend(self, asked_at: float, write_for_s: float) -> None:
        """Extend the window to `write_for_s` seconds after `asked_at`, the time at which the request was sent."""
        # The decode worker counts from the time at which it handles the request, so its window closes after this one.
        self.asked_at, self.ends_at = asked_at, asked_at + write_for_s


@dataclass(slots=True)
class _PeerWindows:
    """The windows that one incarnation of a decode worker has granted to this worker."""

    peer: PeerRef
    address: str
    open: dict[WriteWindow, None] = field(default_factory=dict)
    """The windows of hand-overs that have not ended, in the order in which they were granted."""
    tried_at: float = 0.0
    """The time at which the last renewal was sent (`time.monotonic`)."""
    asking: asyncio.Future[None] | None = None
    """The renewal in flight; None if there is none."""
    timer: asyncio.Future[None] | None = None
    """The task that renews the windows before they close; None if no window is open."""

    def asked_for(self) -> list[WriteWindow]:
        """Return the windows to be renewed by the next message, the oldest first."""
        return sorted((window for window in self.open if not window.over), key=lambda window: window.asked_at)

    def period_s(self) -> float:
        """Return the seconds between two messages, which is also the time limit for the reply to one."""
        return RENEW_AT * min(
            (window.ends_at - window.asked_at for window in self.open if not window.over), default=0.0
        )

    def due_in_s(self) -> float | None:
        """Return the seconds until the next message, or None if no window is open.

        Closed windows are renewed when a hand-over needs them.
        """
        now = time.monotonic()
        live = [window.asked_at for window in self.open if not window.over and now < window.ends_at]
        # After a failed attempt, the next one waits for a whole period.
        return max(min(live), self.tried_at) + self.period_s() - now if live else None


class WindowRenewals:
    """Renews all write windows of a prefill worker.

    Used on the event loop. Owned by `Handoffs`, which passes this object to every hand-over.
    """

    def __init__(self, peers: DecodePeers) -> None:
        self._peers = peers
        self._pairs: dict[PeerRef, _PeerWindows] = {}

    def watch(self, window: WriteWindow) -> None:
        """Renew the window regularly until its lease has ended or `forget` is called."""
        destination = window.destination
        pair = self._pairs.setdefault(destination.peer, _PeerWindows(destination.peer, destination.address))
        pair.open[window] = None
        self._schedule(pair)

    def forget(self, window: WriteWindow) -> None:
        """Stop renewing the window: no further write begins under it."""
        pair = self._pairs.get(window.destination.peer)
        if pair is not None:
            pair.open.pop(window, None)
            if pair.timer is None:
                self._drop_unless_open(pair)

    async def renew(self, peer: PeerRef) -> None:
        """Renew all windows of this decode worker now, or wait for the renewal that is in flight.

        Raises Unavailable or DeadlineExceeded if there is no reply.
        """
        pair = self._pairs.get(peer)
        if pair is not None:
            await self._ask(pair)
            self._schedule(pair)

    async def close(self) -> None:
        """Stop all renewals."""
        left = [task for pair in self._pairs.values() for task in (pair.timer, pair.asking) if task is not None]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def _schedule(self, pair: _PeerWindows) -> None:
        if pair.timer is None:
            pair.timer = asyncio.ensure_future(self._renew_in_time(pair))

    async def _renew_in_time(self, pair: _PeerWindows) -> None:
        """Renew the windows before they close, as long as any of them is open."""
        while (due_s := pair.due_in_s()) is not None:
            if due_s > 0:
                await asyncio.sleep(due_s)
                continue
            try:
                await self._ask(pair)
            except TandemError as error:
                log.info("write windows of %s are renewed again: %s", pair.peer.worker_id, error.message)
            except Exception:
                log.exception("write windows of %s are renewed again", pair.peer.worker_id)
                pair.tried_at = time.monotonic()  # an error that precedes the message must not recur at once
        pair.timer = None
        self._drop_unless_open(pair)

    def _drop_unless_open(self, pair: _PeerWindows) -> None:
        if not pair.open and self._pairs.get(pair.peer) is pair:
            del self._pairs[pair.peer]

    async def _ask(self, pair: _PeerWindows) -> None:
        if pair.asking is None:
            pair.asking = asyncio.ensure_future(self._ask_for_all(pair))
            pair.asking.add_done_callback(_retrieve_exception)
        # Shielded: several hand-overs may wait for the message, and one of them may be cancelled.
        await asyncio.shield(pair.asking)

    async def _ask_for_all(self, pair: _PeerWindows) -> None:
        try:
            due = pair.asked_for()
            for first in range(0, len(due), MOST_LEASES):
                await self._ask_for(pair, due[first : first + MOST_LEASES])
        finally:
            pair.asking = None

    async def _ask_for(self, pair: _PeerWindows, windows: Sequence[WriteWindow]) -> None:
        pair.tried_at = asked_at = time.monotonic()
        answer = await self._peers.renew(pair.peer, pair.address, [window.lease for window in windows], pair.period_s())
        for window in windows:
            if window.lease in answer.ended:
                window.over = True
            else:
                window.extend(asked_at, answer.write_for_s)


def _retrieve_exception(asked: asyncio.Future[None]) -> None:
    """Retrieve the exception; otherwise asyncio logs the failure of a renewal for which no caller waited."""
    if not asked.cancelled():
        asked.exception()
