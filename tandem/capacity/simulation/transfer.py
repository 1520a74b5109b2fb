"""The KV transfer between simulated workers: real hand-overs, with calls and page writes that take network time."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Protocol

from kv_transfer.in_memory import InMemoryTransport
from kv_transfer.in_memory_fabric import NO_MEMORY, InFlightWrite, InMemoryFabric
from kv_transfer.layout import KVLayout
from prefill_worker.decode_peers import AllocatedPages, DecodePeers, Renewal
from tandem.capacity.simulation.clock import VirtualLoop
from tandem.capacity.simulation.network import Network
from tandem.protocol.messages import Destination, Lease, PeerRef


class DecodeEnd(Protocol):
    """The calls that a hand-over makes to a decode worker."""

    transport: InMemoryTransport
    links: float
    """Number of network links of the worker (`Device.links`)."""

    def allocate_pages(self, lease: Lease, pages: int, prefill: PeerRef) -> Sequence[int]:
        """Return the ids of the pages that the prefill worker may write."""

    def release(self, lease: Lease, prefill: PeerRef) -> None:
        """Release the lease of a hand-over that was cancelled."""


class VirtualFabric:
    """The network between the page pools of all workers; the writes of each sender are executed one after the other."""

    def __init__(self, clock: VirtualLoop, network: Network, workers: Mapping[PeerRef, DecodeEnd]) -> None:
        self.fabric = InMemoryFabric(clock, schedule=self._schedule)
        self.network = network
        self._clock, self._workers = clock, workers
        self._free_at: defaultdict[PeerRef, float] = defaultdict(float)
        """For each sender, the time until which its network link is busy."""

    def _schedule(self, posted: InFlightWrite) -> None:
        """Schedule the arrival of a write: bytes ÷ bandwidth after the sender's earlier writes, plus a fixed time.

        The bandwidth is that of the links of the sender or the receiver, whichever has fewer.
        """
        sender, receiver = self._workers[posted.sender], self._workers[posted.write.peer]
        size = len(posted.write.local_pages) * sender.transport.layout.page_bytes
        begun_at = max(self._clock.now, self._free_at[posted.sender])
        bytes_per_s = self.network.bytes_per_s * min(sender.links, receiver.links)
        self._free_at[posted.sender] = begun_at + size / bytes_per_s
        self._clock.at(self._free_at[posted.sender] + self.network.transfer_s, lambda: self._land(posted))

    def _land(self, posted: InFlightWrite) -> None:
        self.fabric.land(posted)
        for notice in list(self.fabric.notices):
            self.fabric.deliver(notice)


class VirtualPeers(DecodePeers):
    """The decode workers, as a simulated prefill worker calls them for a hand-over."""

    def __init__(self, transport: InMemoryTransport, workers: Mapping[PeerRef, DecodeEnd], network: Network) -> None:
        self._transport, self._workers, self._network = transport, workers, network

    async def connect(self, destination: Destination) -> None:
        """Register the peer with the transport; this takes no time."""
        self._transport.add_peer(self._workers[destination.peer].transport.describe())

    async def allocate_pages(self, destination: Destination, pages: int) -> AllocatedPages:
        """See `DecodePeers`; the permission to write never expires."""
        await asyncio.sleep(self._network.call_s)
        page_ids = self._workers[destination.peer].allocate_pages(destination.lease, pages, self._transport.me)
        await asyncio.sleep(self._network.call_s)
        return AllocatedPages(page_ids, math.inf)

    async def renew(self, peer: PeerRef, address: str, leases: Sequence[Lease], within_s: float) -> Renewal:
        """See `DecodePeers`; never called, because permissions to write do not expire."""
        raise NotImplementedError

    def delivered(self, destination: Destination) -> None:
        """Do nothing: the simulated network loses no notice."""

    async def release(self, destination: Destination, *, in_doubt: bool) -> None:
        """See `DecodePeers`."""
        await asyncio.sleep(self._network.call_s)
        self._workers[destination.peer].release(destination.lease, self._transport.me)


def layout_of(pages: int, page_bytes: int) -> KVLayout:
    """Return the layout of a simulated page pool, which has no memory."""
    return KVLayout(NO_MEMORY, pages, 1, 1, 1, (page_bytes,), 1, "virtual")
