"""Other workers that this one has refused, or was refused by: no KV goes from one to the other while both run."""

import logging

from wire.messages import PeerRef

log = logging.getLogger(__name__)


class Misfits:
    """Said in the log once, and to the cluster for as long as it is so. Lives on the event loop."""

    def __init__(self) -> None:
        self._why: dict[PeerRef, str] = {}

    @property
    def warnings(self) -> tuple[str, ...]:
        """A sentence for each, as `tandem status` shows it."""
        return tuple(f"shares no request with {peer.worker_id}: {why}" for peer, why in self._why.items())

    def add(self, peer: PeerRef, why: str) -> None:
        """These two do not fit, in these words."""
        if self._why.get(peer) != why:
            log.warning("no KV passes between this worker and %s: %s", peer.worker_id, why)
        self._why[peer] = why

    def discard(self, peer: PeerRef) -> None:
        """They fit."""
        self._why.pop(peer, None)

    def forget(self, peer: PeerRef) -> None:
        """This run and its earlier ones are over."""
        for known in [known for known in self._why if known.worker_id == peer.worker_id]:
            if known.incarnation <= peer.incarnation:
                del self._why[known]
