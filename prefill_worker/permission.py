"""The permission to write a prompt's pages into the decode worker's, which ends by itself.

A decode worker that takes this one for dead cannot take its pages away: a write is one-sided. So it counts on this:
nothing is posted past the time that it gave, and its pages stay apart until that time is over.
"""

from __future__ import annotations

import math
import time
from types import TracebackType

from prefill_worker.destination import DecodePeers
from prefill_worker.renewals import Renewals
from wire.errors import StaleEpoch, TransferFailed
from wire.messages import Destination, Lease


class Permission:
    """One lease's, for the length of a `with`: as long it is renewed. Time counts from before the request for it left,
    so it ends here before it ends there.
    """

    def __init__(self, peers: DecodePeers, renewals: Renewals, destination: Destination, pages: int) -> None:
        """`pages`: those that the prompt fills. Nothing may be written before `begin_by` has been asked."""
        self.destination = destination
        self.asked_at = self.ends_at = -math.inf
        """When it was last asked for with success, and by when a write may begin (`time.monotonic`)."""
        self.over = False
        """The decode worker has said that the lease is."""
        self._peers, self._renewals, self._pages = peers, renewals, pages
        self._remote: tuple[int, ...] | None = None

    def __enter__(self) -> Permission:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._renewals.forget(self)

    @property
    def lease(self) -> Lease:
        return self.destination.lease

    async def pages(self) -> tuple[int, ...]:
        """Where the last of the prompt's pages go; asked for once. StaleEpoch when the lease is over, Unavailable or
        DeadlineExceeded when nobody says so.
        """
        if self._remote is None:
            asked_at = time.monotonic()
            allotted = await self._peers.allot(self.destination, self._pages)
            self._remote = tuple(allotted.page_ids)
            self.prolong(asked_at, allotted.write_for_s)
            self._renewals.watch(self)
        return self._remote

    async def begin_by(self) -> float:
        """Until when a write may begin (`time.monotonic`). To be used at once.

        It is renewed behind the scenes; only where that failed in time, or this process stood still, it is asked for
        here. Errors as of `pages`; TransferFailed when the answer took longer than it is good for.
        """
        if not self.over and time.monotonic() >= self.ends_at:
            await self._renewals.renew(self.destination.peer)
        if self.over:
            raise StaleEpoch(f"{self.lease} is over at {self.destination.peer.worker_id}; drop this attempt")
        if time.monotonic() >= self.ends_at:
            peer = self.destination.peer.worker_id
            raise TransferFailed(f"{peer} took too long to say that its pages may be written; prefill again elsewhere")
        return self.ends_at

    def until(self) -> float:
        """Until when a write may begin, as far as is known (`time.monotonic`). From any thread."""
        return -math.inf if self.over else self.ends_at

    def prolong(self, asked_at: float, write_for_s: float) -> None:
        """It was given, or given again, to who asked at `asked_at`."""
        self.asked_at, self.ends_at = asked_at, asked_at + write_for_s
