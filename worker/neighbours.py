"""The prefill workers on this host: of those whose processes this one can see it knows whether they live."""

from kv_transfer import processes
from wire.messages import PeerDescription, PeerRef

RUNS_KEPT = 16
"""Of each worker: pages of earlier ones have long been free."""


class Neighbours:
    """By run, since an earlier one may live beside its successor."""

    def __init__(self, host: str) -> None:
        """`host`: this one's name; empty = unknown, and nobody is a neighbour."""
        self._host = host
        self._runs: dict[str, dict[int, str]] = {}

    def meet(self, them: PeerDescription) -> None:
        """They introduce themselves, so they live; if they are not seen to, nothing here tells of their death."""
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
        """Whether this run said that it is on this host. From any thread."""
        return peer.incarnation in self._runs.get(peer.worker_id, {})

    def lives(self, peer: PeerRef) -> bool | None:
        """Whether the process of this run lives; None = unknown. From any thread."""
        process = self._runs.get(peer.worker_id, {}).get(peer.incarnation)
        return processes.lives(process) if process else None
