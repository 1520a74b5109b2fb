"""The transfers that a worker sends, hand-overs and prefixes that others pull; awaited when the worker ends."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from kv_transfer.base import Transport
from kv_transfer.checksums import PageChecks
from prefill_worker.decode_peers import DecodePeers, LocalDecode
from prefill_worker.handoff import Handoff, PrefillSchedulerView
from prefill_worker.page_writes import WritingTime
from prefill_worker.prefix_send import PrefixSend
from prefill_worker.request import PrefillRequest
from prefill_worker.write_window import WindowRenewals
from tandem.engine.cache.prefix_cache import PrefixCache
from tandem.protocol.messages import PeerRef, PrefixPull, RoutedEvent

DRAIN_S = 2.0
"""Timeout of `wait_until_ended`, in seconds; leases that are not released by then end with the process."""


@dataclass(slots=True)
class Handoffs:
    """Starts the worker's transfers with their common parameters, and tracks those that have not ended.

    Owned by the worker; used on the event loop.
    """

    me: PeerRef
    cache: PrefixCache
    transport: Transport
    peers: DecodePeers
    local: LocalDecode
    checks: PageChecks | None
    emit: Callable[[RoutedEvent], None]
    deadline_s: float
    writing: WritingTime
    _open: set[asyncio.Future[None]] = field(default_factory=set)
    _renewals: WindowRenewals = field(init=False)

    def __post_init__(self) -> None:
        self._renewals = WindowRenewals(self.peers)

    def begin(self, request: PrefillRequest, scheduler: PrefillSchedulerView) -> Handoff:
        """Begin the hand-over of a request that has just been queued."""
        handoff = Handoff(
            request=request,
            scheduler=scheduler,
            me=self.me,
            kv=self.cache.kv,
            sender=self.transport,
            backend=self.transport.backend,
            peers=self.peers,
            renewals=self._renewals,
            local=self.local,
            emit=self.emit,
            deadline_s=self.deadline_s,
            writing=self.writing,
            checks=self.checks,
        )
        self._track(handoff.ended)
        return handoff

    def send_prefix(self, pull: PrefixPull) -> int:
        """Begin to send a cached prefix to a worker that pulls it; return the number of digests that it will have.

        Raises NotFound if this worker has no page that the other one lacks.
        """
        send = PrefixSend(
            pull,
            me=self.me,
            cache=self.cache,
            sender=self.transport,
            peers=self.peers,
            renewals=self._renewals,
            deadline_s=self.deadline_s,
            writing=self.writing,
            checks=self.checks,
        )
        self._track(send.ended)
        return send.digests

    async def wait_until_ended(self) -> None:
        """Wait for all transfers to end, and cancel those that take longer than `DRAIN_S` seconds."""
        if self._open:
            _, left = await asyncio.wait(self._open, timeout=DRAIN_S)
            for transfer in left:
                transfer.cancel()
        await self._renewals.close()

    def _track(self, ended: asyncio.Future[None]) -> None:
        self._open.add(ended)
        ended.add_done_callback(self._open.discard)
