"""This worker's NIXL puts its pages into the peer's pool, and sends the notice behind them.

While a write with a notice is held behind others, its receiver is told that the notice is due, and listens closely. It
only saves time: what is lost of it, or comes late, does no harm.
"""

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from kv_transfer.layout import KVLayout
from kv_transfer.nixl_backend.agent import PoolAgent
from kv_transfer.nixl_backend.flight import Flight
from kv_transfer.nixl_backend.moves import Moves
from kv_transfer.nixl_backend.peers import Link, Links
from wire.convert import decode_notice, encode_notice
from wire.errors import TransferFailed
from wire.messages import PeerDescription, PeerRef, TransferNotice

log = logging.getLogger(__name__)

Deliver = Callable[[str, TransferNotice], None]
"""(agent name of the sender, its notice): hands it to the worker, or drops one that is not that sender's."""
NOTICE_DUE = b"\0"
"""In the place of a notice: one follows soon. No TransferNotice is encoded like this."""
DUE_S = 5e-3
"""For how long to listen closely: the last pages of most prompts take less."""


class Writes:
    """Carries writes out: each is one transfer of this agent. What is heard are the notices of others' writes into this
    pool. For the transport's thread alone.
    """

    def __init__(self, agent: PoolAgent, links: Links, layout: KVLayout, deliver: Deliver) -> None:
        self._links, self._layout, self._deliver = links, layout, deliver
        self._moves = Moves(agent, links, layout.page_bytes)
        self._flights: dict[Flight, Link] = {}
        self._due: dict[str, float] = {}
        """Agents whose notice is due, each with the end of that (`time.monotonic`)."""

    @property
    def unfinished(self) -> bool:
        """Whether anything has not come to rest."""
        return bool(self._moves)

    @property
    def waited_for(self) -> bool:
        """Whether somebody waits for any of that."""
        return self._moves.waited_for

    @property
    def handles(self) -> list[Any]:
        """NIXL's handles of all that has not come to rest."""
        return self._moves.handles

    @property
    def next_look_s(self) -> float:
        """How long to wait before the next `poll`."""
        return self._moves.next_look_s

    @property
    def reached(self) -> list[PeerDescription]:
        """Peers of connections whose first transfer has ended well, for whoever takes them off."""
        return self._moves.reached

    def post(self, flight: Flight) -> None:
        """Begin a write, or fail it when it is late, impossible or its peer is out of reach: nothing moved then."""
        write, link = flight.write, self._links.find(flight.write.peer)
        wrong = flight.wrong(link, self._layout.pages)
        if wrong or link is None:
            flight.fail(wrong)
            return
        notice = b"" if write.notice is None else encode_notice(write.notice)
        try:
            if write.local_pages:
                self._flights[flight] = link
                self._moves.begin(link, write.local_pages, write.remote_pages, notice, partial(self._ended, flight))
            else:
                self._links.tell(link, notice)
                flight.land(0)
        except TransferFailed as error:
            self._flights.pop(flight, None)
            flight.future.set_exception(error)

    def poll(self) -> None:
        """Make progress and end what has come to rest."""
        self._moves.poll()

    def hear(self, sender: str, data: bytes) -> None:
        """A notification from the agent `sender`. google.protobuf.message.DecodeError when it cannot be read."""
        if data == NOTICE_DUE:
            self._due[sender] = time.monotonic() + DUE_S
            return
        self._due.pop(sender, None)
        self._deliver(sender, decode_notice(data))

    def announce(self, peer: PeerRef) -> None:
        """A notice for this peer waits for writes in flight: let it listen closely."""
        link = self._links.find(peer)
        if link is None or not link.reached:
            return
        try:
            self._links.tell(link, NOTICE_DUE)
        except TransferFailed as error:
            log.info("a notice could not be announced: %s", error.message)

    @property
    def notice_due(self) -> bool:
        """Whether a peer has said that its notice comes soon."""
        if not self._due:
            return False
        now = time.monotonic()
        self._due = {sender: until for sender, until in self._due.items() if now < until}
        return bool(self._due)

    def abandon(self, link: Link, why: str) -> None:
        """Fail every write to a peer that is taken for dead, each when it is quiet; tell that peer nothing."""
        for flight in [flight for flight, its_link in self._flights.items() if its_link is link]:
            flight.doomed = why

    def abandon_all(self, why: str) -> None:
        """Fail every write: the transport ends."""
        self._moves.abandon_all()
        for flight in self._flights:
            flight.fail(why)
        self._flights.clear()

    def _ended(self, flight: Flight, whole: bool) -> None:
        del self._flights[flight]
        if whole:
            flight.land(len(flight.write.local_pages) * self._layout.page_bytes)
        else:
            flight.fail("the connection failed")
