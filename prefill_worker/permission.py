"""The permission to write a prompt's pages into the decode worker's, which ends by itself.

A decode worker that takes this one for dead cannot take its pages away: a write is one-sided. So it counts on this:
nothing is posted past the time that it gave, and its pages stay apart until that time is over.
"""

import math
import time

from prefill_worker.destination import DecodePeers
from wire.errors import Internal, TransferFailed
from wire.messages import Destination

RENEW_AT = 0.5
"""Part of its time after which a permission is asked for again before it is used."""


class Permission:
    """One lease's. Time counts from before the request for it left, so it ends here before it ends there."""

    def __init__(self, peers: DecodePeers, destination: Destination, pages: int) -> None:
        """`pages`: those that the prompt fills. Nothing may be written before `begin_by` has been asked."""
        self._peers, self._destination, self._pages = peers, destination, pages
        self._remote: tuple[int, ...] | None = None
        self._renew_at = self._ends_at = -math.inf

    async def pages(self) -> tuple[int, ...]:
        """Where the last of the prompt's pages go; asked for once. Errors are those of `begin_by`."""
        if self._remote is None:
            await self._ask()
        return self._remote or ()

    async def begin_by(self) -> float:
        """Until when a write may begin (`time.monotonic`), asked for again when that is near. To be used at once.

        StaleEpoch when the lease is over, Unavailable or DeadlineExceeded when nobody says so, TransferFailed when the
        answer took longer than it is good for.
        """
        if time.monotonic() >= self._renew_at:
            await self._ask()
        if time.monotonic() >= self._ends_at:
            peer = self._destination.peer.worker_id
            raise TransferFailed(f"{peer} took too long to say that its pages may be written; prefill again elsewhere")
        return self._ends_at

    async def _ask(self) -> None:
        asked_at = time.monotonic()
        allotted = await self._peers.allot(self._destination, self._pages)
        if self._remote not in (None, tuple(allotted.page_ids)):
            raise Internal(f"{self._destination.peer.worker_id} allotted other pages than before")
        self._remote = tuple(allotted.page_ids)
        self._renew_at = asked_at + RENEW_AT * allotted.write_for_s
        self._ends_at = asked_at + allotted.write_for_s
