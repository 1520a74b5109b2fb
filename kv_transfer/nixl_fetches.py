"""Direction `read`, at the receiver's: transfers that peers have asked this worker to carry out.

    unknown ──order──► heard ──begin──► moving ──at rest──► ended: LANDED, after the notice was delivered
       │ cancel          │ cancel, or     │ cancel
       ▼                 ▼ too old        ▼
     ended: NOT_BEGUN ◄──┘              withheld ──at rest──► ended: WITHHELD
                                                (either way FAILED, if the connection failed)

Nothing begins before everything that had come is heard, so that a cancel behind its order wins. And nothing begins that
may have lain here for `OLD_S`, because this process stood still: a sender that took it for dead uses those pages again
`REMOVED_REST_S` after it asked, and a copy by the kernel may be over before this end looks at anything else.

Each order is carried out once, however often it comes, and each transfer has one end, which is told as often as it is
asked for: so an answer that is lost costs time and nothing else. Sender and receiver always agree, since only this end
decides: a cancel that comes too late hears LANDED, and the sender goes on as the receiver does.

Ends are remembered until the sender says, with each note, below which number all is over for it; what comes after that
for such a number is late, or a duplicate, and is dropped. All of it belongs to one run of the sender and to one of this
worker, and is forgotten with either.

Each sender has room for so many transfers, and none takes another's. Where its room is used up, notes about further
transfers are dropped, unanswered: it says them again, and of its oldest, which is always heard, it learns the end. To
answer what is not remembered would be wrong, since a late order would then begin what its sender takes for over.
"""

import logging
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial

from kv_transfer.layout import KVLayout
from kv_transfer.listening import OLD_S
from kv_transfer.nixl_agent import agent_name
from kv_transfer.nixl_mover import Deliver, misfit
from kv_transfer.nixl_moves import Moves
from kv_transfer.nixl_peers import Link, Links
from wire.convert import encode_read_note
from wire.errors import TransferFailed
from wire.read_notes import ReadAnswer, ReadCancel, ReadEnd, ReadOrder

log = logging.getLogger(__name__)

MOST_TRANSFERS = 4096
"""Of one sender, moving or remembered."""


@dataclass(slots=True, eq=False)
class _Fetch:
    """A transfer that is heard, or moves."""

    order: ReadOrder
    withheld: bool = False


@dataclass(slots=True, eq=False)
class _Ledger:
    """What is known of one sender's transfers from number `oldest` on."""

    oldest: int = 0
    transfers: dict[int, _Fetch | ReadEnd] = field(default_factory=dict)

    def has_room_for(self, note: ReadOrder | ReadCancel) -> bool:
        """Whether a transfer is known, or may be."""
        full = len(self.transfers) >= MOST_TRANSFERS
        return not full or note.number in self.transfers or note.number == note.oldest

    def forget_below(self, oldest: int) -> None:
        if oldest > self.oldest:
            self.oldest = oldest
            for one in self.transfers.values():
                if isinstance(one, _Fetch) and one.order.number < oldest:
                    one.withheld = True
            self.transfers = {number: one for number, one in self.transfers.items() if number >= oldest}


class Fetches:
    """All that peers have asked this worker to read. For the transport's thread alone.

    It begins transfers among `moves`, which somebody else polls.
    """

    def __init__(self, links: Links, layout: KVLayout, moves: Moves, deliver: Deliver) -> None:
        self._links, self._layout, self._moves, self._deliver = links, layout, moves, deliver
        self._ledgers: dict[Link, _Ledger] = {}
        self._heard: deque[tuple[Link, _Ledger, _Fetch]] = deque()
        self._leaving = False
        self.dropped = 0
        """Notes that named a transfer that was over, or for which there was no room."""

    def order(self, link: Link, order: ReadOrder) -> None:
        """Carry a transfer out, unless it is known: `begin` does."""
        ledger = self._current(link, order)
        if ledger is None:
            return
        known = ledger.transfers.get(order.number)
        if known is None:
            fetch = ledger.transfers[order.number] = _Fetch(order)
            self._heard.append((link, ledger, fetch))
        elif isinstance(known, ReadEnd):
            self._answer(link, order.number, known)

    def begin(self, since: float) -> None:
        """All that had come is heard: begin what was ordered. It may have lain here `since` then (`time.monotonic`)."""
        while self._heard:
            link, ledger, fetch = self._heard.popleft()
            if self._ledgers.get(link) is ledger:
                self._begin(link, ledger, fetch, self._why_not(link, fetch, since))

    def cancel(self, link: Link, cancel: ReadCancel) -> None:
        """Do not begin a transfer, or do not deliver its notice; too late if it has ended."""
        ledger = self._current(link, cancel)
        if ledger is None:
            return
        known = ledger.transfers.get(cancel.number)
        if isinstance(known, _Fetch):
            known.withheld = True
        elif known is None:
            self._end(link, ledger, cancel.number, ReadEnd.NOT_BEGUN)
        else:
            self._answer(link, cancel.number, known)

    def abandon(self, link: Link) -> None:
        """That sender's process is gone: nothing of it is delivered or answered any more."""
        self._ledgers.pop(link, None)
        self._moves.abandon(link)

    def leave(self) -> None:
        """Begin nothing any more."""
        self._leaving = True

    def _current(self, link: Link, note: ReadOrder | ReadCancel) -> _Ledger | None:
        """The sender's ledger, or None for a note about what is over or finds no room."""
        ledger = self._ledgers.setdefault(link, _Ledger())
        ledger.forget_below(note.oldest)
        if note.number >= ledger.oldest and ledger.has_room_for(note):
            return ledger
        self.dropped += 1
        why = "is over" if note.number < ledger.oldest else f"is one of more than {MOST_TRANSFERS}"
        log.info("a note of %s about transfer %d, which %s, was dropped", _name(link), note.number, why)
        return None

    def _why_not(self, link: Link, fetch: _Fetch, since: float) -> str:
        """Why it is not begun; "" = it is."""
        if fetch.withheld:
            return "it was cancelled"
        if self._leaving:
            return "this worker ends"
        unheard_s = time.monotonic() - since
        if unheard_s > OLD_S:
            return f"nobody listened here for {unheard_s:.1f} s, and it may have been asked that long ago"
        order = fetch.order
        return misfit(order.target_pages, self._layout.pages, order.source_pages, link.description.pages)

    def _begin(self, link: Link, ledger: _Ledger, fetch: _Fetch, why_not: str) -> None:
        order = fetch.order
        if why_not:
            log.warning("transfer %d of %s is not begun: %s", order.number, _name(link), why_not)
            self._end(link, ledger, order.number, ReadEnd.NOT_BEGUN)
            return
        ended = partial(self._at_rest, link, ledger, fetch)
        if not order.target_pages:
            ended(True)
            return
        try:
            self._moves.begin(link, order.target_pages, order.source_pages, b"", ended)
        except TransferFailed as error:
            log.info("transfer %d of %s: %s", order.number, _name(link), error.message)
            ended(False)

    def _at_rest(self, link: Link, ledger: _Ledger, fetch: _Fetch, whole: bool) -> None:
        order, end = fetch.order, ReadEnd.LANDED
        if not whole:
            end = ReadEnd.FAILED
        elif fetch.withheld:
            end = ReadEnd.WITHHELD
        elif order.notice is not None:
            self._deliver(_name(link), order.notice)
        self._end(link, ledger, order.number, end)

    def _end(self, link: Link, ledger: _Ledger, number: int, end: ReadEnd) -> None:
        if number >= ledger.oldest:
            ledger.transfers[number] = end
        self._answer(link, number, end)

    def _answer(self, link: Link, number: int, end: ReadEnd) -> None:
        answer = ReadAnswer(number, link.description.peer.incarnation, end)
        try:
            self._links.tell(link, encode_read_note(answer))
        except TransferFailed as error:
            log.info("%s does not hear yet that transfer %d is over: %s", _name(link), number, error.message)


def _name(link: Link) -> str:
    return agent_name(link.description.peer)
