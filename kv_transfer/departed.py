"""Runs of other workers that are believed dead."""

from wire.messages import PeerRef


class Departed:
    """A death is one of a run and of all before it, and a belief: a run that serves after all is taken back."""

    def __init__(self) -> None:
        self._until: dict[str, int] = {}

    def __contains__(self, peer: PeerRef) -> bool:
        return peer.incarnation <= self._until.get(peer.worker_id, -1)

    def add(self, peer: PeerRef) -> None:
        """This run and its earlier ones are over."""
        self._until[peer.worker_id] = max(peer.incarnation, self._until.get(peer.worker_id, 0))

    def is_last(self, peer: PeerRef) -> bool:
        """Whether no later run of that worker is believed dead, but this one is."""
        return self._until.get(peer.worker_id) == peer.incarnation

    def take_back(self, peer: PeerRef) -> bool:
        """This run serves; False = it was not believed dead, or a later one is."""
        was_last = self.is_last(peer)
        if was_last:
            self._until[peer.worker_id] = peer.incarnation - 1
        return was_last
