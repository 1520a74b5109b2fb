"""Connects a worker to those to which it may send KV in advance, so that no request waits for a first connection.

A worker that computes prompts sends their KV to decode workers, and any worker sends prefixes to workers that compute
prompts and pull them.
"""

import asyncio
from collections.abc import Callable
from functools import partial

from tandem.protocol.messages import PeerRef, WorkerInfo
from tandem.worker.peers.peers import Peers

FIRST_RETRY_S, LAST_RETRY_S = 1.0, 60.0
"""The first and the longest wait between two attempts to warm up the same connection, in seconds; the wait doubles."""


class WarmUps:
    """Warms up connections to the other workers in the membership.

    Call `close` before the peers are closed. Owned by the worker.
    """

    def __init__(self, peers: Peers, prefills: Callable[[], bool]) -> None:
        """Create the warm-ups; `prefills` returns True if this worker's own prefill phase is open."""
        self._peers = peers
        self._prefills = prefills
        self._others: dict[str, WorkerInfo] = {}
        self._running: dict[PeerRef, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, info: WorkerInfo) -> None:
        """Record that another worker serves or has opened another phase; connect to it if prompts may be sent to it."""
        self._others[info.peer.worker_id] = info
        self.start_due()

    def forget(self, peer: PeerRef) -> None:
        """Stop connecting to this incarnation and its earlier ones, which are assumed dead."""
        known = self._others.get(peer.worker_id)
        if known is not None and known.peer.incarnation <= peer.incarnation:
            del self._others[peer.worker_id]
        for running_peer in list(self._running):
            if running_peer.worker_id == peer.worker_id and running_peer.incarnation <= peer.incarnation:
                self._running.pop(running_peer).cancel()

    def start_due(self) -> None:
        """Start to connect to each worker to which prompts may be sent and that is not connected yet."""
        for info in self._others.values():
            if self._wanted(info.peer) and info.peer not in self._running:
                task = asyncio.ensure_future(self._warm_up(info.peer, info.address))
                self._running[info.peer] = task
                self._tasks.add(task)
                task.add_done_callback(partial(self._ended, info.peer))

    async def _warm_up(self, peer: PeerRef, address: str) -> None:
        """Retry the warm-up of the connection until it succeeds or this worker no longer sends KV there."""
        wait_s = FIRST_RETRY_S
        while not await self._peers.warm_up(peer, address):
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LAST_RETRY_S)
            if not self._wanted(peer):
                return

    def _wanted(self, peer: PeerRef) -> bool:
        """Return True if this worker may send KV to this incarnation: prompts, or prefixes that it pulls."""
        info = self._others.get(peer.worker_id)
        if info is None or info.peer != peer:
            return False
        return info.takes_prompts or (info.takes_answers and self._prefills())

    def _ended(self, peer: PeerRef, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if self._running.get(peer) is task:
            del self._running[peer]

    async def close(self) -> None:
        """Cancel all attempts."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
