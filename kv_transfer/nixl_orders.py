"""Direction `read`, at the sender's: transfers that peers were asked to carry out, until they say how each ended.

Nothing here can tell whether a peer reads: only its answer, or the end of its process, makes a transfer quiet, and
until then its pages must not change. So what is not answered is said again, over a new connection if need be: before
its deadline, and while it may begin, the order, which a peer carries out once however often it comes; after that, that
it is cancelled, and never the order again. A removed peer may live and read: its answer or some time is waited for.

Numbers are of all peers together, so that none comes twice in this worker's life. What is over is said to each peer of
its own alone: one that is silent keeps nothing open at the others'.
"""

import itertools
import logging
import math
import time
from dataclasses import dataclass

from kv_transfer.nixl_agent import agent_name
from kv_transfer.nixl_mover import Flight
from kv_transfer.nixl_peers import Link, Links
from kv_transfer.pace import LAST_LOOK_S, Pace
from wire.convert import encode_read_note
from wire.errors import TransferFailed
from wire.messages import PeerRef
from wire.read_notes import ReadAnswer, ReadCancel, ReadEnd, ReadNote, ReadOrder

log = logging.getLogger(__name__)

SAY_AGAIN_S = 1.0
"""How long a transfer may go without an answer before its peer is told again."""
REMOVED_REST_S = 15.0
"""How long a removed peer may go on to read: it begins at most `OLD_S` after it was asked, and has the rest to end. A
bound, not a proof."""
_WHY = {
    ReadEnd.WITHHELD: "it came to rest after its deadline",
    ReadEnd.NOT_BEGUN: "the peer never began it, or heard of it too late",
    ReadEnd.FAILED: "the connection failed",
}


@dataclass(slots=True, eq=False)
class _Order:
    flight: Flight
    link: Link
    bytes: int
    say_at: float
    cancelled: bool = False
    rests_at: float = math.inf
    """When it counts as quiet without an answer."""


class Orders:
    """All that this worker has asked its peers to read. For the transport's thread alone."""

    def __init__(self, links: Links, page_bytes: int) -> None:
        self._links, self._page_bytes = links, page_bytes
        self._numbers = itertools.count(1)
        self._open: dict[int, _Order] = {}
        self._asked: dict[PeerRef, dict[int, None]] = {}
        """Numbers of the open ones by peer, the oldest first."""
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
        self._asked.setdefault(flight.write.peer, {})[number] = None
        try:
            self._links.tell(link, encode_read_note(self._note(number, order)))
        except TransferFailed:
            self._close(number)
            raise

    def poll(self) -> None:
        """Say again what is due, and end what was asked of removed peers long ago."""
        now = time.monotonic()
        for number, order in list(self._open.items()):
            if now >= order.rests_at:
                self._close(number)
                order.flight.fail(_WHY[ReadEnd.NOT_BEGUN])
            elif now >= order.say_at:
                order.cancelled |= order.flight.late or order.flight.forbidden
                self._say_again(number, order)

    def answered(self, link: Link, answer: ReadAnswer) -> None:
        """A peer says how a transfer ended. Answers to what is over here, or was asked of another peer, are dropped."""
        order = self._open.get(answer.number)
        if order is None or order.link is not link:
            log.info("%s answers to transfer %d, which is over", link.description.peer.worker_id, answer.number)
            return
        self._close(answer.number)
        self._pace.ended(order.bytes)
        if answer.end is ReadEnd.LANDED:
            order.flight.land(order.bytes)
        else:
            order.flight.fail(_WHY[answer.end])

    def link_of(self, number: int, agent: str) -> Link | None:
        """The link over which this transfer was asked of the agent of this name, be its peer removed or not."""
        order = self._open.get(number)
        return order.link if order is not None and agent_name(order.link.description.peer) == agent else None

    def leave(self) -> None:
        """Whatever has not landed yet shall not, and nobody waits for removed peers."""
        for number, order in list(self._open.items()):
            if order.flight.doomed:
                self._close(number)
                order.flight.fail(order.flight.doomed)
            else:
                order.cancelled = True
                self._say_again(number, order)

    def abandon(self, link: Link, why: str) -> None:
        """Those that were asked of the peer of `link`, which is removed, fail: with its answer, or after a while. It is
        told once more, to spare both the wait.
        """
        for number, order in self._open.items():
            if order.link is link:
                order.flight.doomed, order.cancelled = why, True
                self._say_again(number, order)
                order.say_at, order.rests_at = math.inf, time.monotonic() + REMOVED_REST_S

    def fail_all(self, why: str) -> None:
        """Nobody waits any more."""
        for order in self._open.values():
            order.flight.fail(why)
        self._open.clear()
        self._asked.clear()

    def _close(self, number: int) -> None:
        peer = self._open.pop(number).flight.write.peer
        del self._asked[peer][number]
        if not self._asked[peer]:
            del self._asked[peer]

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
        write = order.flight.write
        oldest = next(iter(self._asked[write.peer]))
        if order.cancelled:
            return ReadCancel(number, oldest, write.peer.incarnation)
        pages = tuple(write.local_pages), tuple(write.remote_pages)
        return ReadOrder(number, oldest, write.peer.incarnation, *pages, write.notice)
