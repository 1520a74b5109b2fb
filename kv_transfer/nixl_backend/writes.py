"""Writes of pages to a peer's pool, and the notices that follow them.

While a write with a notice waits for other writes, the sender announces the notice to the receiver, which then polls
often. The announcement only saves time: a lost or late one does no harm.
"""

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from kv_transfer.layout import KVLayout
from kv_transfer.nixl_backend.agent import PoolAgent
from kv_transfer.nixl_backend.peers import Link, Links
from kv_transfer.nixl_backend.pending_write import PendingWrite
from kv_transfer.nixl_backend.posted_transfers import PostedTransfers
from tandem.protocol.conversion import decode_notice, encode_notice
from tandem.protocol.errors import TransferFailed
from tandem.protocol.messages import PeerDescription, PeerRef, TransferNotice

log = logging.getLogger(__name__)

Deliver = Callable[[str, TransferNotice], None]
"""Called with a notice and the agent name of its sender; drops the notice if it claims another sender."""
NOTICE_DUE = b"\0"
"""The payload of the announcement of a notice. No TransferNotice is encoded like this."""
DUE_S = 5e-3
"""The time in seconds for which the transport polls frequently after a peer has announced a notice.

The notice follows the last pages of a prompt; for most prompts their transfer takes less time than this.
"""


class Writes:
    """Carries out page writes, each as one transfer of this agent, and receives notices.

    Used on the transport's thread only. Owned by the transport.
    """

    def __init__(self, agent: PoolAgent, links: Links, layout: KVLayout, deliver: Deliver) -> None:
        self._links, self._layout, self._deliver = links, layout, deliver
        self._posted = PostedTransfers(agent, links)
        self._flights: dict[PendingWrite, Link] = {}
        self._due: dict[str, float] = {}
        """Agents that have announced a notice, each with the end of the frequent polls for it (`time.monotonic`)."""

    @property
    def unfinished(self) -> bool:
        """True if any transfer is not quiescent."""
        return bool(self._posted)

    @property
    def waited_for(self) -> bool:
        """True if a caller waits for any transfer that is not quiescent."""
        return self._posted.waited_for

    @property
    def handles(self) -> list[Any]:
        """NIXL handles of all transfers that are not quiescent."""
        return self._posted.handles

    @property
    def next_look_s(self) -> float:
        """The time to wait before the next `poll`, in seconds."""
        return self._posted.next_look_s

    @property
    def reached(self) -> list[PeerDescription]:
        """Peers whose connection has completed its first transfer; the reader removes them from the list."""
        return self._posted.reached

    def post(self, flight: PendingWrite) -> None:
        """Begin a write, or fail it if it cannot begin (`PendingWrite.invalid_reason`) or its peer cannot be reached.

        A write that fails here has moved nothing.
        """
        write, link = flight.write, self._links.find(flight.write.peer)
        invalid = flight.invalid_reason(link, self._layout.pages)
        if invalid or link is None:
            flight.fail(invalid)
            return
        notice = b"" if write.notice is None else encode_notice(write.notice)
        try:
            if write.local_pages:
                self._flights[flight] = link
                self._posted.begin(link, write, notice, partial(self._ended, flight))
            else:
                self._links.notify(link, notice)
                flight.complete(0)
        except TransferFailed as error:
            self._flights.pop(flight, None)
            flight.future.set_exception(error)

    def poll(self) -> None:
        """Poll the posted transfers, and complete those that are quiescent."""
        self._posted.poll()

    def receive(self, sender: str, data: bytes) -> None:
        """Process a message from the agent `sender`: a notice, or the announcement of one.

        Raises google.protobuf.message.DecodeError if it cannot be decoded.
        """
        if data == NOTICE_DUE:
            self._due[sender] = time.monotonic() + DUE_S
            return
        self._due.pop(sender, None)
        self._deliver(sender, decode_notice(data))

    def announce(self, peer: PeerRef) -> None:
        """Announce a notice that waits for writes in flight, so that the peer polls often."""
        link = self._links.find(peer)
        if link is None or not link.reached:
            return
        try:
            self._links.notify(link, NOTICE_DUE)
        except TransferFailed as error:
            log.info("a notice could not be announced: %s", error.message)

    @property
    def notice_due(self) -> bool:
        """True if a peer announced a notice less than `DUE_S` seconds ago and has sent no notice since.

        The transport then polls frequently.
        """
        if not self._due:
            return False
        now = time.monotonic()
        self._due = {sender: until for sender, until in self._due.items() if now < until}
        return bool(self._due)

    def abandon(self, link: Link, why: str) -> None:
        """Fail every write over `link`, each once it is quiescent. The peer, which is assumed dead, is not notified."""
        for flight in [flight for flight, its_link in self._flights.items() if its_link is link]:
            flight.failure = why

    def abandon_all(self, why: str) -> None:
        """Fail every write at once, because the transport closes."""
        self._posted.abandon_all()
        for flight in self._flights:
            flight.fail(why)
        self._flights.clear()

    def _ended(self, flight: PendingWrite, whole: bool) -> None:
        link = self._flights.pop(flight)
        if whole:
            flight.complete(link.written_bytes(flight.write))
        else:
            flight.fail("the connection failed")
