"""Measures the peak bandwidth between two page pools in two processes, without engines."""

import asyncio
import random
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kv_transfer.backends import open_transport
from kv_transfer.base import PageWrite, WriteDone
from tandem.cluster.ray_processes.ray_node import RayNode
from tandem.cluster.ray_processes.ray_process import actor_class
from tandem.engine.cache.paged_cache import PagedCache, page_bytes
from tandem.engine.config.model import ModelSpec
from tandem.protocol.messages import PeerDescription, PeerRef
from tandem.worker.transfer import layout_of

IN_FLIGHT = 4
"""Concurrent writes of a steady stream, because a prefill worker hands over several requests at a time."""
_DEADLINE_S = 60.0
_POOL_BYTES = {"cuda": 8 << 30, "cpu": 1 << 30}
_WARM = 4
_ROUNDS, _ROUNDS_S = 24, 0.3
"""Minimum number of timed writes, and minimum seconds; short writes need many repetitions."""
_CEILING_ROUNDS, _CEILING_ROUND_S = 5, 0.1


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """The model of the pools, the tokens per page, the dtypes of KV and of the model, and the devices."""

    model: ModelSpec
    page_tokens: int
    dtype: torch.dtype
    model_dtype: torch.dtype
    sender: str
    receiver: str
    trusted_network: bool = False

    @property
    def kind(self) -> str:
        """The type of the devices: `cpu` or `cuda`."""
        return self.sender.split(":")[0]


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bandwidth of writes of one size, in bytes per second.

    `alone` is for writes one after another, `steady` for `IN_FLIGHT` at a time.
    """

    pages: int
    alone: float
    steady: float


class PoolSide:
    """One pool with its transport; each of the two runs as a Ray actor."""

    def __init__(self, plan: PoolPlan, name: str, device: str) -> None:
        here = torch.device(device)
        if here.type == "cuda":
            torch.cuda.set_device(here)
        capacity = _POOL_BYTES[here.type]
        self._cache = PagedCache(plan.model, plan.page_tokens, capacity, plan.dtype, here, model_dtype=plan.model_dtype)
        self._cache.storage.view(torch.uint8).random_(256)
        if here.type == "cuda":
            torch.cuda.synchronize()
        me, layout = PeerRef(name, 1), layout_of(self._cache)
        self._transport = open_transport("nixl", layout, me, lambda _notice: None, trusted_network=plan.trusted_network)

    def describe(self) -> PeerDescription:
        """Return the address at which the other side reaches this pool."""
        return self._transport.describe()

    def introduce(self, peer: PeerDescription) -> None:
        """Add the other side as a peer, and poll for its writes from now on."""
        self._transport.add_peer(peer)
        self._transport.expect(1)

    def bandwidth(self, peer: PeerRef, sizes: Sequence[int]) -> list[Bandwidth]:
        """Measure writes of these numbers of pages to shuffled pages, as in a pool that has been in use."""
        bandwidths = []
        for pages in sizes:
            self._stream(peer, pages, 1, writes=_WARM, seconds=0)
            alone = self._stream(peer, pages, 1)
            steady = self._stream(peer, pages, IN_FLIGHT)
            bandwidths.append(Bandwidth(pages, alone, steady))
        return bandwidths

    def wire(self) -> str:
        """Return the name of the transport, including the sender's UCX transport."""
        return self._transport.transport_name()

    def open_ports(self) -> tuple[str, ...]:
        """Return the TCP ports on which UCX listens."""
        return self._transport.open_ports()

    def close(self) -> None:
        """Close the transport."""
        self._transport.close()

    def _stream(
        self, peer: PeerRef, pages: int, in_flight: int, writes: int = _ROUNDS, seconds: float = _ROUNDS_S
    ) -> float:
        """Return the bytes per second of a stream of writes, up to `in_flight` at a time.

        The stream has at least `writes` writes and takes at least `seconds`.
        """
        chosen = random.Random(pages)
        waiting: list[Future[WriteDone]] = []
        done, started = 0, time.perf_counter()
        while done < writes or time.perf_counter() - started < seconds:
            if len(waiting) == in_flight:
                waiting.pop(0).result()
            local, remote = (chosen.sample(range(self._cache.pages), pages) for _ in range(2))
            waiting.append(self._transport.write(PageWrite(peer, local, remote), _DEADLINE_S))
            done += 1
        for write in waiting:
            write.result()
        return done * pages * self._cache.page_bytes / (time.perf_counter() - started)


async def measure_pools(plan: PoolPlan, sizes: Sequence[int]) -> tuple[list[Bandwidth], str, tuple[str, ...]]:
    """Return the bandwidth of each size between two processes, the transport, and the TCP ports that UCX opened."""
    node = RayNode()
    node.start({}, processes=2)
    try:
        actor = actor_class(PoolSide)
        sender, receiver = (actor.remote(plan, *end) for end in (("from", plan.sender), ("to", plan.receiver)))
        descriptions = [await side.describe.remote() for side in (sender, receiver)]
        await sender.introduce.remote(descriptions[1])
        await receiver.introduce.remote(descriptions[0])
        bandwidths = await sender.bandwidth.remote(descriptions[1].peer, sizes)
        wire = await sender.wire.remote()
        ports = await sender.open_ports.remote()
        await asyncio.gather(*(_quietly(side.close.remote()) for side in (sender, receiver)))
        return bandwidths, wire, ports
    finally:
        node.stop()


def copy_ceiling(plan: PoolPlan, sizes: Sequence[int]) -> float:
    """Return the bytes per second of plain copies between the devices in this process: the best round of any size.

    Copies are as large as writes of `sizes` pages, within buffers twice as large as the largest one.
    """
    page = page_bytes(plan.model, plan.page_tokens, plan.dtype, plan.model_dtype)
    shape = (2 * max(sizes), page)
    source = torch.ones(shape, dtype=torch.uint8, device=plan.sender)
    target = torch.ones(shape, dtype=torch.uint8, device=plan.receiver)
    best = 0.0
    for pages in sizes:
        _copies(plan, source, target, pages)
        best = max(best, *(_copies(plan, source, target, pages) for _ in range(_CEILING_ROUNDS)))
    del source, target
    if plan.kind == "cuda":
        torch.cuda.empty_cache()
    return best


def _copies(plan: PoolPlan, source: Tensor, target: Tensor, pages: int) -> float:
    """Return the bytes per second of one round of copies of `pages` contiguous pages at random positions."""
    chosen = random.Random(pages)
    done, started = 0, time.perf_counter()
    while not done or time.perf_counter() - started < _CEILING_ROUND_S:
        for _ in range(IN_FLIGHT):
            here, there = (chosen.randrange(len(source) - pages + 1) for _ in range(2))
            target[there : there + pages].copy_(source[here : here + pages])
        if plan.kind == "cuda":
            torch.cuda.synchronize(plan.sender)
            torch.cuda.synchronize(plan.receiver)
        done += IN_FLIGHT
    return done * pages * source.shape[1] / (time.perf_counter() - started)


async def _quietly(reply: Any) -> None:
    try:
        await reply
    except Exception as error:
        print(f"a pool did not close: {error}")
