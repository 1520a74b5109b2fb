"""Direction `read`, at the sender's: transfers that peers were asked to carry out, until they say how each ended.

Nothing here can tell whether a peer reads: only its answer, or the end of its process, makes a transfer quiet, and
until then its pages must not change. So what is not answered is said again, over a new connection if need be: before
its deadline the order, which a peer carries out once however often it comes; after its deadline that it is cancelled,
and never the order again.
"""

import itertools
import logging
import time
from dataclasses import dataclass

from kv_transfer.nixl_mover import Flight
from kv_transfer.nixl_peers import Link, Links
from kv_transfer.pace import LAST_LOOK_S, Pace
from wire.convert import encode_read_note
from wire.errors import TransferFailed
from wire.read_notes import ReadAnswer, ReadCancel, ReadEnd, ReadNote, ReadOrder

log = logging.getLogger(__name__)

SAY_AGAIN_S = 1.0
"""How long a transfer may go without an answer before its peer is told again."""
_WHY = {
    ReadEnd.WITHHELD: "it came to rest after its deadline",
    ReadEnd.NOT_BEGUN: "the peer never began it",
    ReadEnd.FAILED: "the connection failed",
}


@dataclass(slots=True, eq=False)
class _Order:
    flight: Flight
    link: Link
    bytes: int
    say_at: float
    cancelled: bool = False


class Orders:
    """All that this worker has asked its peers to read. For the transport's thread alone."""

    def __init__(self, links: Links, page_bytes: int) -> None:
        self._links, self._page_bytes = links, page_bytes
        self._numbers = itertools.count(1)
        self._open: dict[int, _Order] = {}
        self._pace = Pace()

    def __len__(self) -> int:
        return len(self._open)

    @property
    def next_look_s(self) -> float:
        return self._pace.wait_s(next(iter(self._open.values())).bytes) if self._open else LAST_LOOK_S

    def place(self, flight: Flight, link: Link) -> None:
        """Ask the peer for the first time. TransferFailed: it is out of reach and has heard nothing."""
        number = next(self._numbers)
        order = _Order(flight, link, len(flight.write.local_pages) * self._page_bytes, self._next_say(flight))
        self._pace.began(len(self._open))
        self._open[number] = order
        try:
            self._links.tell(link, encode_read_note(self._note(number, order)))
        except TransferFailed:
            del self._open[number]
            raise

    def poll(self) -> None:
        """Say again what is due."""
        now = time.monotonic()
        for number, order in self._open.items():
            if now >= order.say_at:
                order.cancelled |= order.flight.late
                self._say_again(number, order)

    def answered(self, link: Link, answer: ReadAnswer) -> None:
        """A peer says how a transfer ended. Answers to what is over here, or was asked of another peer, are dropped."""
        order = self._open.get(answer.number)
        if order is None or order.link is not link:
            log.info("%s answers to transfer %d, which is over", link.description.peer.worker_id, answer.number)
            return
        del self._open[answer.number]
        self._pace.ended(order.bytes)
        if answer.end is ReadEnd.LANDED:
            order.flight.land(order.bytes)
        else:
            order.flight.fail(_WHY[answer.end])

    def cancel_all(self) -> None:
        """Whatever has not landed yet shall not."""
        for number, order in self._open.items():
            order.cancelled = True
            self._say_again(number, order)

    def abandon(self, link: Link | None, why: str) -> None:
        """Fail all that were asked of the peer of `link`, whose process is gone; None = of all peers."""
        for number, order in list(self._open.items()):
            if link is None or order.link is link:
                del self._open[number]
                order.flight.fail(why)

    def _say_again(self, number: int, order: _Order) -> None:
        order.say_at = self._next_say(order.flight)
        try:
            self._links.tell(order.link, encode_read_note(self._note(number, order)))
        except TransferFailed as error:
            log.info("transfer %d: %s", number, error.message)

    def _next_say(self, flight: Flight) -> float:
        now = time.monotonic()
        again = now + SAY_AGAIN_S
        return min(again, flight.deadline) if now < flight.deadline else again

    def _note(self, number: int, order: _Order) -> ReadNote:
        write, oldest = order.flight.write, next(iter(self._open))
        if order.cancelled:
            return ReadCancel(number, oldest, write.peer.incarnation)
        pages = tuple(write.local_pages), tuple(write.remote_pages)
        return ReadOrder(number, oldest, write.peer.incarnation, *pages, write.notice)
