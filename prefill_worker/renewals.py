"""Permissions to write, renewed before they end: one message to each decode worker for all that it has given.

A message leaves when the oldest of them has used up a part of its time, and names them all. So there is one for each
pair of workers in that time however many prompts are handed over, and none where no hand-over takes that long.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from prefill_worker.destination import DecodePeers
from wire.errors import TandemError
from wire.messages import Destination, Lease, PeerRef

log = logging.getLogger(__name__)

RENEW_AT = 1 / 3
"""Part of its time after which a permission is asked for again, and in which that has to be answered: one message may
be lost."""
MOST_LEASES = 1024
"""Of one message; more go with another."""


class Renewable(Protocol):
    """A permission; see `Permission`. Times are `time.monotonic`."""

    destination: Destination
    asked_at: float
    ends_at: float
    over: bool

    @property
    def lease(self) -> Lease: ...

    def prolong(self, asked_at: float, write_for_s: float) -> None: ...


@dataclass(slots=True)
class _Pair:
    """This worker and one run of a decode worker: the permissions of one for the pages of the other."""

    peer: PeerRef
    address: str
    open: dict[Renewable, None] = field(default_factory=dict)
    tried_at: float = 0.0
    asking: asyncio.Future[None] | None = None
    timer: asyncio.Future[None] | None = None

    def asked_for(self) -> list[Renewable]:
        """Those to name, the oldest first."""
        return sorted((each for each in self.open if not each.over), key=lambda each: each.asked_at)

    def period_s(self) -> float:
        """Between two messages, and for the answer to one."""
        return RENEW_AT * min((each.ends_at - each.asked_at for each in self.open if not each.over), default=0.0)

    def due_in_s(self) -> float | None:
        """Until the next message; None = there is nothing to keep: one that has ended is renewed when it is needed."""
        now = time.monotonic()
        live = [each.asked_at for each in self.open if not each.over and now < each.ends_at]
        return max(min(live), self.tried_at) + self.period_s() - now if live else None


class Renewals:
    """All open permissions of a prefill worker. Lives on the event loop."""

    def __init__(self, peers: DecodePeers) -> None:
        self._peers = peers
        self._pairs: dict[PeerRef, _Pair] = {}

    def watch(self, permission: Renewable) -> None:
        """Renew it until it is over or forgotten."""
        destination = permission.destination
        pair = self._pairs.setdefault(destination.peer, _Pair(destination.peer, destination.address))
        pair.open[permission] = None
        self._tend(pair)

    def forget(self, permission: Renewable) -> None:
        """Nothing more will be written under it."""
        pair = self._pairs.get(permission.destination.peer)
        if pair is not None:
            pair.open.pop(permission, None)
            if pair.timer is None:
                self._drop_unless_open(pair)

    async def renew(self, peer: PeerRef) -> None:
        """Ask now for all that this worker has given, or wait for the answer that is on its way.

        Unavailable or DeadlineExceeded when there is none.
        """
        pair = self._pairs.get(peer)
        if pair is not None:
            await self._ask(pair)
            self._tend(pair)

    async def close(self) -> None:
        """Ask for nothing any more."""
        left = [each for pair in self._pairs.values() for each in (pair.timer, pair.asking) if each is not None]
        for each in left:
            each.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def _tend(self, pair: _Pair) -> None:
        if pair.timer is None:
            pair.timer = asyncio.ensure_future(self._keep(pair))

    async def _keep(self, pair: _Pair) -> None:
        """In time, as long as there is anything to keep."""
        while (due_s := pair.due_in_s()) is not None:
            if due_s > 0:
                await asyncio.sleep(due_s)
                continue
            try:
                await self._ask(pair)
            except TandemError as error:
                log.info("permissions of %s are asked for again: %s", pair.peer.worker_id, error.message)
            except Exception:
                log.exception("permissions of %s are asked for again", pair.peer.worker_id)
        pair.timer = None
        self._drop_unless_open(pair)

    def _drop_unless_open(self, pair: _Pair) -> None:
        if not pair.open and self._pairs.get(pair.peer) is pair:
            del self._pairs[pair.peer]

    async def _ask(self, pair: _Pair) -> None:
        if pair.asking is None:
            pair.asking = asyncio.ensure_future(self._ask_for_all(pair))
            pair.asking.add_done_callback(_look_at)
        # Shielded: several hand-overs may wait for it, and one of them may be cancelled.
        await asyncio.shield(pair.asking)

    async def _ask_for_all(self, pair: _Pair) -> None:
        try:
            named = pair.asked_for()
            for first in range(0, len(named), MOST_LEASES):
                await self._ask_for(pair, named[first : first + MOST_LEASES])
        finally:
            pair.asking = None

    async def _ask_for(self, pair: _Pair, some: Sequence[Renewable]) -> None:
        pair.tried_at = asked_at = time.monotonic()
        answer = await self._peers.renew(pair.peer, pair.address, [each.lease for each in some], pair.period_s())
        for each in some:
            if each.lease in answer.over:
                each.over = True
            else:
                each.prolong(asked_at, answer.write_for_s)


def _look_at(asked: asyncio.Future[None]) -> None:
    """Or asyncio logs the failure of one that nobody waited for to its end."""
    if not asked.cancelled():
        asked.exception()
