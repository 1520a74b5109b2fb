"""The peers to which a NIXL transport writes: one link per worker id, to its latest incarnation only."""

import logging
import time
from dataclasses import dataclass

from kv_transfer.base import PageRanges, PageWrite, written_bytes
from kv_transfer.nixl_backend.agent import Connection, PoolAgent
from tandem.protocol.errors import TandemError, TransferFailed
from tandem.protocol.messages import PeerDescription, PeerRef

log = logging.getLogger(__name__)

WATCH_S = 1.0
"""The interval between checks that peers' processes are alive, in seconds."""


@dataclass(slots=True, eq=False)
class Link:
    """A known peer and the state of the connection to it.

    Writes over it copy the `ranges` of each page (`RankTransport.add_peer`); without ranges, whole pages. `connection`
    is None before the first use and after a failure. `broken`: the endpoint has failed, and is rebuilt once the last of
    the `in_flight` transfers is quiescent. `reached`: a transfer over the connection has succeeded.
    """

    description: PeerDescription
    ranges: PageRanges = ()
    connection: Connection | None = None
    broken: bool = False
    in_flight: int = 0
    reached: bool = False

    def written_bytes(self, write: PageWrite) -> int:
        """Return the number of bytes that a write over this link copies."""
        return written_bytes(write, self.ranges, self.description.page_bytes)


class Links:
    """The known peers by worker id. Used on the transport's thread only. Owned by the transport."""

    def __init__(self, agent: PoolAgent) -> None:
        self._agent = agent
        self._links: dict[str, Link] = {}
        self._leaving: list[Link] = []
        self._watch_at = 0.0

    def find(self, peer: PeerRef) -> Link | None:
        """Return the link to this incarnation, or None if there is none or it is to another incarnation."""
        link = self._links.get(peer.worker_id)
        return link if link is not None and link.description.peer == peer else None

    def find_until(self, peer: PeerRef) -> Link | None:
        """Return the link to this incarnation or an earlier one, or None."""
        link = self._links.get(peer.worker_id)
        return link if link is not None and link.description.peer.incarnation <= peer.incarnation else None

    def replaced_by(self, description: PeerDescription) -> Link | None:
        """Return the link to an earlier incarnation of the same worker, or None.

        The caller must drop it before `add`.
        """
        return self.find_until(PeerRef(description.peer.worker_id, description.peer.incarnation - 1))

    def add(self, description: PeerDescription, ranges: PageRanges = ()) -> None:
        """Register a peer and connect to it, unless there is a link to this worker already.

        Writes to the peer copy the `ranges` of each page, or whole pages if there are none.
        """
        if description.peer.worker_id in self._links:
            return
        link = self._links[description.peer.worker_id] = Link(description, ranges)
        try:
            self.connected(link)
        except TandemError as error:
            log.info("%s; the next write tries again", error.message)

    def connected(self, link: Link) -> Connection:
        """Return the link's connection, rebuilt if necessary. Raises TransferFailed if the peer cannot be reached."""
        peer = link.description.peer
        if link.broken:
            if link.in_flight:
                raise TransferFailed(f"the connection to {peer.worker_id} has failed; prefill again")
            self._disconnect(link)
        if link.connection is None:
            if any(leaving.description.peer == peer for leaving in self._leaving):
                # NIXL identifies agents by name, so ending the old connection would end the new one.
                raise TransferFailed(f"writes to {peer.worker_id} from before its return have not ended; try again")
            try:
                link.connection = self._agent.connect(link.description, link.ranges)
            except Exception as error:
                raise TransferFailed(f"no connection to {peer.worker_id}: {error!r}; prefill again") from error
        return link.connection

    def notify(self, link: Link, note: bytes) -> None:
        """Send a notification on its own, without a page write. Raises TransferFailed if it was not sent."""
        connection = self.connected(link)
        try:
            self._agent.notify(connection, note)
        except Exception as error:
            link.broken = True
            peer = link.description.peer.worker_id
            raise TransferFailed(f"a notification to {peer} could not be sent: {error!r}; prefill again") from error

    def drop(self, link: Link) -> None:
        """Remove a peer. Its connection ends once its last write in flight is quiescent (`sweep`)."""
        self._links.pop(link.description.peer.worker_id, None)
        self._leaving.append(link)
        self.sweep()

    def sweep(self) -> None:
        """Disconnect the removed peers that have no transfer in flight."""
        for link in [link for link in self._leaving if not link.in_flight]:
            self._leaving.remove(link)
            self._disconnect(link)

    def watch(self) -> None:
        """Mark the links to peers whose processes have ended as broken; checks once per `WATCH_S`."""
        now = time.monotonic()
        if now < self._watch_at:
            return
        self._watch_at = now + WATCH_S
        for link in [*self._links.values(), *self._leaving]:
            self._break_if_dead(link)

    def _break_if_dead(self, link: Link) -> None:
        if link.connection is not None and not link.broken:
            link.broken = self._agent.fail_if_dead(link.description, link.connection)

    def drop_all(self) -> None:
        """Remove all peers."""
        for link in list(self._links.values()):
            self.drop(link)

    def _disconnect(self, link: Link) -> None:
        self._break_if_dead(link)  # otherwise UCX waits for the dead process to read its notices
        connection, link.connection, link.broken, link.reached = link.connection, None, False, False
        if connection is not None:
            try:
                self._agent.disconnect(connection)
            except Exception as error:
                log.info("dropping %s: %r", connection.agent, error)
