"""The membership: workers register in it, the controller removes dead workers from it, and routers watch it.

One event loop owns a registry; no call blocks.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from dataclasses import replace

from tandem.protocol.errors import StaleEpoch
from tandem.protocol.messages import AdapterFacts, ExpectedWorker, Membership, PeerRef, Role, WorkerInfo

log = logging.getLogger(__name__)


class Registry:
    """The serving workers, with at most one incarnation of each worker id. Belongs to the controller's event loop."""

    def __init__(self) -> None:
        self._revision = 0
        self._workers: dict[str, WorkerInfo] = {}
        self._gone: dict[str, int] = {}
        self._changed = asyncio.Event()
        self.complete = asyncio.Event()
        """Set once all serving workers are known: this controller has taken them over, or mirrors the leader."""
        self._mode = ""
        self._adapters: tuple[AdapterFacts, ...] | None = None
        self.lack: Callable[[WorkerInfo], str] = lambda _: ""
        """Returns the reason why routers must send a worker no new requests; "" = none."""
        self.wanted: Callable[[], Mapping[str, Role]] = dict
        """Returns the workers that serve or will serve without an operator's action, with their roles."""
        self._mirrored: tuple[ExpectedWorker, ...] = ()
        """The expected workers that `mirror` has copied from the leader's registry."""

    def set_mode(self, mode: str) -> None:
        """Set the mode that routers follow from now on."""
        if mode != self._mode:
            self._mode = mode
            self._publish()

    def set_adapters(self, adapters: tuple[AdapterFacts, ...] | None) -> None:
        """Set the adapters that requests may name from now on; None = those that the workers started with."""
        if adapters != self._adapters:
            self._adapters = adapters
            self._publish()

    def look_again(self) -> None:
        """Publish the membership again after a change of `lack` or `wanted`."""
        self._publish()

    def mirror(self, membership: Membership) -> None:
        """Copy the membership, mode, adapters and expected workers of another registry."""
        workers = {info.peer.worker_id: info for info in membership.workers}
        copied = workers, membership.mode, membership.adapters, membership.expected
        if copied != (self._workers, self._mode, self._adapters, self._mirrored):
            self._workers, self._mode, self._adapters, self._mirrored = copied
            self._publish()
        self.complete.set()

    def keep(self, peers: Collection[PeerRef]) -> None:
        """Remove all workers except `peers` permanently, and all expected workers that `mirror` has copied.

        From now on the membership is complete.
        """
        self._mirrored = ()
        for info in self.membership().workers:
            if info.peer not in peers:
                self.unregister(info.peer)
        self.complete.set()

    def register(self, info: WorkerInfo) -> None:
        """Add a worker, or replace its earlier incarnation. Raises StaleEpoch for an incarnation that has ended."""
        worker_id, incarnation = info.peer.worker_id, info.peer.incarnation
        known = self._workers.get(worker_id)
        # A late registration of an incarnation that has ended must not replace its successor.
        if incarnation <= self._gone.get(worker_id, -1) or (known and incarnation < known.peer.incarnation):
            raise StaleEpoch(f"incarnation {incarnation} of {worker_id} has ended; start the worker again")
        if known == info:
            return
        self._workers[worker_id] = info
        _log_changes(known, info)
        self._publish()

    def unregister(self, peer: PeerRef) -> bool:
        """Remove this incarnation for good; return True if it was serving. Other incarnations of the worker stay."""
        self._gone[peer.worker_id] = max(peer.incarnation, self._gone.get(peer.worker_id, -1))
        known = self._workers.get(peer.worker_id)
        if known is None or known.peer != peer:
            return False
        del self._workers[peer.worker_id]
        self._publish()
        return True

    def membership(self) -> Membership:
        """Return all serving workers and all expected ones, sorted by id.

        A worker that drains is expected if it will be started again.
        """
        workers = tuple(self._whole(self._workers[key]) for key in sorted(self._workers))
        taking = {name for name, info in self._workers.items() if info.open is not None}
        own = (ExpectedWorker(*entry) for entry in sorted(self.wanted().items()) if entry[0] not in taking)
        return Membership(self._revision, workers, self._mode, self._adapters, tuple(own) or self._mirrored)

    async def watch(self) -> AsyncIterator[Membership]:
        """Yield the membership now and after each change; a slow watcher skips outdated versions."""
        while True:
            changed = self._changed
            yield self.membership()
            await changed.wait()

    def _whole(self, info: WorkerInfo) -> WorkerInfo:
        lack = self.lack(info)
        return info if not lack else replace(info, not_ready="; ".join(filter(None, (info.not_ready, lack))))

    def _publish(self) -> None:
        self._revision += 1
        self._changed.set()
        self._changed = asyncio.Event()


def _log_changes(known: WorkerInfo | None, info: WorkerInfo) -> None:
    """Log a worker's changes of role and readiness and its new warnings, but not its arrival or departure."""
    if known and known.open is not info.open:
        log.info("%s takes %s work now", info.peer.worker_id, info.open or "no")
    if info.not_ready and not (known and known.not_ready):
        log.error("%s is not ready: %s", info.peer.worker_id, info.not_ready)
    elif known and known.not_ready and not info.not_ready:
        log.info("%s is ready again", info.peer.worker_id)
    for warning in info.warnings:
        if known is None or warning not in known.warnings:
            log.warning("%s: %s", info.peer.worker_id, warning)
