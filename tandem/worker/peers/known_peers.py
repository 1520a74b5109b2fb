"""This worker's record of others: prefill workers on the same host, and workers incompatible with it."""

import logging

from kv_transfer.nixl_backend import processes
from tandem.protocol.messages import PeerDescription, PeerRef

log = logging.getLogger(__name__)

RUNS_KEPT = 16
"""The most runs of each worker that are remembered: pages of earlier ones have long been free."""


class SameHostPeers:
    """The prefill workers on this host; it knows whether those live whose processes can be seen from here.

    Entries are by run, because an earlier run may live while its successor does.
    """

    def __init__(self, host: str) -> None:
        """`host` is the name of this host; if it is empty, no peer counts as being on it."""
        self._host = host
        self._runs: dict[str, dict[int, str]] = {}

    def add(self, them: PeerDescription) -> None:
        """Record a peer that introduces itself, and so lives; if its process cannot be seen, its death goes unseen."""
        if not self._host or them.host != self._host:
            return
        runs = self._runs.setdefault(them.peer.worker_id, {})
        if processes.lives(them.process):
            runs[them.peer.incarnation] = them.process
        else:
            runs.setdefault(them.peer.incarnation, "")
        if len(runs) > RUNS_KEPT:
            del runs[min(runs)]

    def has(self, peer: PeerRef) -> bool:
        """Return whether this run said that it is on this host. From any thread."""
        return peer.incarnation in self._runs.get(peer.worker_id, {})

    def lives(self, peer: PeerRef) -> bool | None:
        """Return whether the process of this run lives; None if that is unknown. From any thread."""
        process = self._runs.get(peer.worker_id, {}).get(peer.incarnation)
        return processes.lives(process) if process else None


class IncompatiblePeers:
    """Workers that this one has refused, or was refused by: no KV is transferred between them while both run.

    Each is logged once, and reported to the cluster for as long as it is known. Lives on the event loop.
    """

    def __init__(self) -> None:
        self._why: dict[PeerRef, str] = {}

    @property
    def warnings(self) -> tuple[str, ...]:
        """One sentence for each, as `tandem status` shows it."""
        return tuple(f"shares no request with {peer.worker_id}: {why}" for peer, why in self._why.items())

    def add(self, peer: PeerRef, why: str) -> None:
        """Record that the peer is incompatible, and why."""
        if self._why.get(peer) != why:
            log.warning("no KV passes between this worker and %s: %s", peer.worker_id, why)
        self._why[peer] = why

    def discard(self, peer: PeerRef) -> None:
        """Record that the peer is compatible."""
        self._why.pop(peer, None)

    def forget(self, peer: PeerRef) -> None:
        """Forget a run that is over, and its earlier ones."""
        for known in [known for known in self._why if known.worker_id == peer.worker_id]:
            if known.incarnation <= peer.incarnation:
                del self._why[known]
