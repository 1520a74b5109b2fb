"""The fake without a thread: every page of every write lands when a tester says so, and every notice arrives then.

    fabric = FabricByHand(clock)
    ...                                   # transports as with `InMemoryFabric`
    fabric.land(fabric.flights[0], 1)     # one page of the first write
    fabric.land(fabric.flights[0])        # the rest of it: the writer hears that it is done
    fabric.hear(0)                        # its notice arrives
    fabric.fail(fabric.flights[0])        # a write fails; what the network holds of it may land until `rest`

So writes overtake each other, end in the middle, outlive their writer or their own failure for a while, and notices
come late, twice or never. What it keeps of the contract (`kv_transfer/base.py`): a settled write reads no page any more
and, if it was a success, moves no byte; and a notice is there only after every byte of its write. For one thread.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

from kv_transfer.in_memory import InMemoryTransport
from kv_transfer.in_memory_flight import Flight
from wire.errors import TransferFailed
from wire.messages import PeerRef, TransferNotice


@dataclass(slots=True, eq=False)
class OnTheWay:
    """A write on its way: how far it is, and the bytes themselves once its writer is dead or knows that it failed."""

    flight: Flight
    landed: int = 0
    """Pages of it that are there."""
    orphan: list[bytes] | None = None
    """What the network still holds of the pages of a dead writer, or of a write that failed; None otherwise."""
    failed: bool = False
    """Its writer was told so; nobody hears its notice."""


@dataclass(frozen=True, slots=True)
class LateNotice:
    """A notice whose write has landed."""

    peer: PeerRef
    notice: TransferNotice


class FabricByHand:
    """The network between the transports of one process. `on_page` hears of each page just before it lands: the write,
    the local page and the remote one.
    """

    def __init__(self, clock: Callable[[], float], on_page: Callable[[Flight, int, int], None] | None = None) -> None:
        self.flights: list[OnTheWay] = []
        """Writes that have not come to rest, in the order they were posted."""
        self.notices: list[LateNotice] = []
        """Notices that can arrive now."""
        self._clock = clock
        self._on_page = on_page
        self._ends: dict[PeerRef, InMemoryTransport] = {}

    def land(self, one: OnTheWay, pages: int | None = None) -> None:
        """So many more pages land, or all; after the last one the write is settled."""
        write = one.flight.write
        receiver = self._ends.get(write.peer)
        if receiver is None:
            self.fail(one)
            return
        self._move(one, receiver, pages)
        if one.landed == len(write.local_pages):
            self._notice_leaves(one)
            self.flights.remove(one)
            if one.orphan is None:
                one.flight.land(receiver.layout.page_bytes, self.now(), heard=write.notice is not None)

    def fail(self, one: OnTheWay, *, after_notice: bool = False) -> None:
        """The connection of a write breaks: its writer hears so, and what is not there yet lands late, until `rest`.

        `after_notice`: all of it has landed, its notice has left.
        """
        sender, receiver = self._ends.get(one.flight.sender), self._ends.get(one.flight.write.peer)
        if after_notice and receiver is not None and not one.failed:
            self._move(one, receiver, None)
            self._notice_leaves(one)
        if one.orphan is not None or sender is None or receiver is None or after_notice:
            self.rest(one)
            return
        one.orphan = [_bytes(sender, page) for page in one.flight.write.local_pages]
        one.failed = True
        one.flight.future.set_exception(TransferFailed("the write failed on the way; prefill again"))

    def rest(self, one: OnTheWay) -> None:
        """Nothing of a write lands any more; it fails, unless its writer knows or is dead."""
        self.flights.remove(one)
        if one.orphan is None:
            one.flight.future.set_exception(TransferFailed("the write failed on the way; prefill again"))

    def hear(self, late: LateNotice, *, again: bool = False) -> None:
        """A notice arrives; with `again` it will once more."""
        if not again:
            self.notices.remove(late)
        receiver = self._ends.get(late.peer)
        if receiver is not None:
            receiver.on_notice(late.notice)

    def lose_notice(self, late: LateNotice) -> None:
        """A notice never arrives; its writer believes it did."""
        self.notices.remove(late)

    def kill(self, peer: PeerRef) -> None:
        """The process of `peer` is gone. Writes to it fail; its own go on to land until `bury`."""
        end = self._ends.pop(peer, None)
        for one in self.flights:
            if one.flight.sender == peer and end is not None and not one.failed:
                one.orphan = [_bytes(end, page) for page in one.flight.write.local_pages]
        self.drop_flights(lambda flight: flight.write.peer == peer, f"{peer.worker_id} is gone")

    def bury(self, peer: PeerRef) -> None:
        """Nothing that a dead process wrote is on the way any more; its notices may be."""
        self.flights = [one for one in self.flights if one.flight.sender != peer]

    def _move(self, one: OnTheWay, receiver: InMemoryTransport, pages: int | None) -> None:
        sender, write = self._ends.get(one.flight.sender), one.flight.write
        pairs = list(zip(write.local_pages, write.remote_pages, strict=True))
        for local, remote in pairs[one.landed :][:pages]:
            if self._on_page is not None:
                self._on_page(one.flight, local, remote)
            source = _bytes(sender, local) if sender is not None and one.orphan is None else _kept(one)
            ctypes.memmove(receiver.layout.page_address(remote), source, receiver.layout.page_bytes)
            one.landed += 1

    def _notice_leaves(self, one: OnTheWay) -> None:
        if one.flight.write.notice is not None and not one.failed:
            self.notices.append(LateNotice(one.flight.write.peer, one.flight.write.notice))

    def now(self) -> float:
        return self._clock()

    def attach(self, end: InMemoryTransport) -> None:
        self._ends[end.me] = end

    def detach(self, end: InMemoryTransport) -> None:
        if self._ends.get(end.me) is end:
            del self._ends[end.me]

    def post(self, flight: Flight) -> None:
        self.flights.append(OnTheWay(flight))

    def drop_flights(self, lost: Callable[[Flight], bool], why: str) -> None:
        dropped = [one for one in self.flights if lost(one.flight)]
        self.flights = [one for one in self.flights if not lost(one.flight)]
        for one in dropped:
            if one.orphan is None:
                one.flight.future.set_exception(TransferFailed(f"the write failed: {why}; prefill again"))


def _bytes(end: InMemoryTransport, page: int) -> bytes:
    return ctypes.string_at(end.layout.page_address(page), end.layout.page_bytes)


def _kept(one: OnTheWay) -> bytes:
    if one.orphan is None:
        raise AssertionError("a write whose writer is gone was not told so; use `kill`")
    return one.orphan[one.landed]
