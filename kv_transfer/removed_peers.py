"""The set of incarnations of other workers that are assumed dead."""

from tandem.protocol.messages import PeerRef


class RemovedPeers:
    """The set of worker incarnations that are assumed dead.

    If an incarnation is assumed dead, all earlier ones are too. An incarnation that is found to serve is removed from
    the set.
    """

    def __init__(self) -> None:
        self._until: dict[str, int] = {}

    def __contains__(self, peer: PeerRef) -> bool:
        return peer.incarnation <= self._until.get(peer.worker_id, -1)

    def add(self, peer: PeerRef) -> None:
        """Add the incarnation `peer`, and thereby all earlier incarnations of the same worker."""
        self._until[peer.worker_id] = max(peer.incarnation, self._until.get(peer.worker_id, 0))

    def is_last(self, peer: PeerRef) -> bool:
        """Return True if this is the latest incarnation of its worker that is assumed dead."""
        return self._until.get(peer.worker_id) == peer.incarnation

    def restore(self, peer: PeerRef) -> bool:
        """Remove an incarnation that was found to serve. Returns False, and changes nothing, unless it `is_last`."""
        was_last = self.is_last(peer)
        if was_last:
            self._until[peer.worker_id] = peer.incarnation - 1
        return was_last
