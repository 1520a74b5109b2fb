"""Keeps leases alive until the decode worker has admitted their requests: one heartbeat for all of a worker's."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from wire.errors import TandemError
from wire.messages import GrantedLease, Lease

log = logging.getLogger(__name__)

Beat = Callable[[Sequence[Lease], float], Awaitable[frozenset[Lease]]]
"""Sends one heartbeat, with a deadline in seconds; returns the leases among them that the worker no longer holds."""

_ROUNDS_TO_BELIEVE = 3
"""Heartbeats in a row that must call a lease unknown: together one lease's length."""


class LeaseKeeper:
    """The leases of one decode worker that are granted and not yet admitted."""

    def __init__(self, beat: Beat, on_lost: Callable[[Lease], None]) -> None:
        self._beat = beat
        self._on_lost = on_lost
        self._held: dict[str, GrantedLease] = {}
        self._unknown_rounds: dict[Lease, int] = {}
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._held)

    def keep(self, granted: GrantedLease) -> None:
        """Heartbeat this lease until `drop`; a later lease of the same request replaces it."""
        self._held[granted.lease.request_id] = granted
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="router-heartbeats")

    def drop(self, request_id: str) -> None:
        """The request was admitted or is over."""
        self._held.pop(request_id, None)

    def close(self) -> None:
        self._held.clear()
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        """A heartbeat every third of the shortest lease, each over before the next one is due: a lease outlives a call
        that stalls.
        """
        due = time.monotonic()
        while self._held:
            period = min(granted.duration_s for granted in self._held.values()) / 3
            due = max(due + period, time.monotonic())
            await asyncio.sleep(due - time.monotonic())
            leases = [granted.lease for granted in self._held.values()]
            try:
                if leases:
                    await self._round(leases, period)
            except Exception:
                log.exception("a heartbeat for %d leases failed", len(leases))

    async def _round(self, leases: Sequence[Lease], timeout_s: float) -> None:
        try:
            unknown = await self._beat(leases, timeout_s)
        except TandemError:
            return  # a dead worker is noticed by its stream, a slow one gets the next heartbeat
        # A lease that was admitted a moment ago is unknown too, and its event may still be on the way: only what stays
        # unknown and is not admitted meanwhile is lost.
        self._unknown_rounds = {
            lease: self._unknown_rounds.get(lease, 0) + 1 for lease in unknown if self._holds(lease)
        }
        for lease, rounds in self._unknown_rounds.items():
            if rounds >= _ROUNDS_TO_BELIEVE:
                self.drop(lease.request_id)
                self._on_lost(lease)

    def _holds(self, lease: Lease) -> bool:
        granted = self._held.get(lease.request_id)
        return granted is not None and granted.lease == lease
