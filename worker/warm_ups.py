"""Connections that are made before a user's prompt needs one: from who prefills to everybody who decodes."""

import asyncio
from collections.abc import Callable
from functools import partial

from wire.messages import PeerRef, WorkerInfo
from worker.peers import Peers


class WarmUps:
    """Follows the other workers as the controller names them. `close` it before the peers."""

    def __init__(self, peers: Peers, prefills: Callable[[], bool]) -> None:
        """`prefills`: whether this worker's own prefill half is open now."""
        self._peers = peers
        self._prefills = prefills
        self._others: dict[str, WorkerInfo] = {}
        self._running: dict[PeerRef, asyncio.Task[None]] = {}

    def see(self, info: WorkerInfo) -> None:
        """Another worker serves, or has opened other halves."""
        self._others[info.peer.worker_id] = info
        self.look()

    def forget(self, peer: PeerRef) -> None:
        """This run and its earlier ones are believed dead."""
        known = self._others.get(peer.worker_id)
        if known is not None and known.peer.incarnation <= peer.incarnation:
            del self._others[peer.worker_id]

    def look(self) -> None:
        """Connect to whoever may get prompts from here and is not connected; one that is costs next to nothing."""
        for info in self._others.values() if self._prefills() else ():
            if info.takes_answers and info.peer not in self._running:
                task = asyncio.ensure_future(self._peers.warm_up(info.peer, info.address))
                self._running[info.peer] = task
                task.add_done_callback(partial(self._ended, info.peer))

    def _ended(self, peer: PeerRef, _task: "asyncio.Task[None]") -> None:
        self._running.pop(peer, None)

    async def close(self) -> None:
        """Nothing is waited for."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
