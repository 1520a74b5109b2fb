"""Renews leases until the decode workers have admitted their requests; a heartbeat renews all of a worker's leases.

A lease that is not renewed expires, so that a decode worker gets its pages back even if the router dies.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from tandem.protocol.errors import TandemError
from tandem.protocol.messages import GrantedLease, Lease

log = logging.getLogger(__name__)

Beat = Callable[[Sequence[Lease], float], Awaitable[frozenset[Lease]]]
"""A function that sends one heartbeat with a deadline in seconds, and returns the leases unknown to the worker."""

_ROUNDS_TO_BELIEVE = 3
"""Number of consecutive heartbeats that must report a lease as unknown before it counts as lost.

They are sent within one lease duration.
"""


class LeaseKeeper:
    """Renews the leases that one decode worker has granted, each until the worker has admitted the lease's request.

    The `WorkerLink` owns it; all calls are on the event loop. `on_lost` is called with each lease that the worker no
    longer holds.
    """

    def __init__(self, beat: Beat, on_lost: Callable[[Lease], None]) -> None:
        self._beat = beat
        self._on_lost = on_lost
        self._held: dict[str, GrantedLease] = {}
        self._unknown_rounds: dict[Lease, int] = {}
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._held)

    def keep(self, granted: GrantedLease) -> None:
        """Renew the lease until `drop` is called; an earlier lease of the same request is no longer renewed."""
        self._held[granted.lease.request_id] = granted
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="router-heartbeats")

    def drop(self, request_id: str) -> None:
        """Stop renewing the lease of a request: the worker has admitted the request, or the request has ended."""
        self._held.pop(request_id, None)

    def close(self) -> None:
        """Stop all heartbeats."""
        self._held.clear()
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        """Send a heartbeat every third of the shortest lease duration.

        The timeout of a heartbeat is the time until the next one, so that a lease survives one stalled call.
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
            return  # the event stream detects a dead worker, and a slow worker gets the next heartbeat
        # The worker also reports a lease as unknown if it has just admitted the request, and the event that says so may
        # still be in flight. So a lease counts as lost only if it stays unknown without an admission.
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
