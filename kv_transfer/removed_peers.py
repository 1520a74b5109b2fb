"""Incarnations of other workers that are assumed dead."""

from tandem.protocol.messages import PeerRef


class RemovedPeers:
    """The set of worker incarnations assumed dead.

    The death of an incarnation includes all before it. It is an assumption: an incarnation that turns out to serve is
    removed again.
    """

    def __init__(self) -> None:
        self._until: dict[str, int] = {}

    def __contains__(self, peer: PeerRef) -> bool:
        return peer.incarnation <= self._until.get(peer.worker_id, -1)

    def add(self, peer: PeerRef) -> None:
        """Marks this incarnation and all earlier ones as dead."""
        self._until[peer.worker_id] = max(peer.incarnation, self._until.get(peer.worker_id, 0))

    def is_last(self, peer: PeerRef) -> bool:
        """Returns True if this is the latest incarnation of its worker that is assumed dead."""
        return self._until.get(peer.worker_id) == peer.incarnation

    def restore(self, peer: PeerRef) -> bool:
        """Removes an incarnation that serves after all; returns False if it was not the latest one assumed dead."""
        was_last = self.is_last(peer)
        if was_last:
            self._until[peer.worker_id] = peer.incarnation - 1
        return was_last
