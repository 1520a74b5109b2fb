"""Direction `read`: the peer's NIXL gets this worker's pages, when it is told which, and says when it has them.

sender                                    receiver
ReadOrder ───────────────────────────────► posts a NIXL READ
                                           … all bytes are there: delivers the notice
the write is over ◄───────────── ReadAnswer
"""

import logging
from typing import Any

from kv_transfer.layout import KVLayout
from kv_transfer.nixl_agent import PoolAgent
from kv_transfer.nixl_fetches import Fetches
from kv_transfer.nixl_mover import Deliver, Flight, Mover
from kv_transfer.nixl_moves import Moves
from kv_transfer.nixl_orders import Orders
from kv_transfer.nixl_peers import Link, Links
from wire.convert import decode_read_note
from wire.errors import TransferFailed
from wire.messages import PeerDescription, PeerRef
from wire.read_notes import ReadAnswer, ReadCancel, ReadOrder

log = logging.getLogger(__name__)


class Reads(Mover):
    """Both ends: a worker sends and receives alike."""

    def __init__(self, agent: PoolAgent, links: Links, layout: KVLayout, deliver: Deliver) -> None:
        self._me, self._links, self._layout = agent.me, links, layout
        self._moves = Moves(agent, links, layout.page_bytes)
        self._orders = Orders(links, layout.page_bytes)
        self._fetches = Fetches(links, layout, self._moves, deliver)

    @property
    def unfinished(self) -> bool:
        return bool(self._moves or self._orders)

    @property
    def waited_for(self) -> bool:
        return bool(self._orders) or self._moves.waited_for

    @property
    def handles(self) -> list[Any]:
        return self._moves.handles

    @property
    def next_look_s(self) -> float:
        return min(self._moves.next_look_s, self._orders.next_look_s)

    @property
    def reached(self) -> list[PeerDescription]:
        return self._moves.reached

    def post(self, flight: Flight) -> None:
        link = self._links.find(flight.write.peer)
        wrong = flight.wrong(link, self._layout.pages)
        if wrong or link is None:
            flight.fail(wrong)
            return
        try:
            self._orders.place(flight, link)
        except TransferFailed as error:
            flight.future.set_exception(error)

    def poll(self) -> None:
        self._moves.poll()
        self._orders.poll()

    def hear(self, sender: str, data: bytes) -> None:
        note, link = decode_read_note(data), self._links.find_agent(sender)
        if link is None and isinstance(note, ReadAnswer):
            # It was removed, and lives: what it was asked to read is over sooner than by waiting.
            link = self._orders.link_of(note.number, sender)
        if link is None:
            log.info("a note from %s, which is not known here or gone, was dropped", sender)
            return
        meant = note.sender_incarnation if isinstance(note, ReadAnswer) else note.reader_incarnation
        if meant != self._me.incarnation:
            log.info("a note from %s is for incarnation %d of this worker; it was dropped", sender, meant)
            return
        match note:
            case ReadOrder():
                self._fetches.order(link, note)
            case ReadCancel():
                self._fetches.cancel(link, note)
            case ReadAnswer():
                self._orders.answered(link, note)

    def act(self, since: float) -> None:
        self._fetches.begin(since)

    def announce(self, peer: PeerRef) -> None:
        """The peer knows when its notice is due: it moves the pages."""

    @property
    def notice_due(self) -> bool:
        return False

    def abandon(self, link: Link, why: str) -> None:
        self._orders.abandon(link, why)
        self._fetches.abandon(link)

    @property
    def reads_in_vain(self) -> bool:
        return self._moves.abandoned

    def abandon_all(self, why: str) -> None:
        self._orders.fail_all(why)
        self._moves.abandon_all()

    def leave(self) -> None:
        self._fetches.leave()
        self._orders.leave()
