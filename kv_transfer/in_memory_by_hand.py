"""The fake without a thread: every page of every write lands, and every notice arrives, when a test says so.

    fabric = FabricByHand(clock)
    ...                                   # transports as with `InMemoryFabric`
    fabric.land(fabric.flights[0], 1)     # one page of the first write
    fabric.land(fabric.flights[0])        # the rest of it: the writer's future is done
    fabric.hear(0)                        # its notice arrives
    fabric.fail(fabric.flights[0])        # a write fails; what the network holds of it may land until `rest`

So writes overtake each other, end in the middle, or outlive their writer or their own failure for a while, and notices
come late, twice or never. The contract (`kv_transfer/base.py`) still holds: a settled write reads no page any more and,
if it succeeded, moves no byte; and a notice exists only after every byte of its write. For one thread.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

from kv_transfer.in_memory import InMemoryTransport
from kv_transfer.in_memory_flight import Flight
from tandem.protocol.errors import TransferFailed
from tandem.protocol.messages import PeerRef, TransferNotice


@dataclass(slots=True, eq=False)
class OnTheWay:
    """A write in flight: its progress, and the bytes themselves once its writer is dead or has seen it fail."""

    flight: Flight
    landed: int = 0
    """The number of its pages that have landed."""
    orphan: list[bytes] | None = None
    """The pages that the network still holds for a dead writer or a failed write; None otherwise."""
    failed: bool = False
    """True if its writer has seen it fail; its notice is never delivered."""


@dataclass(frozen=True, slots=True)
class LateNotice:
    """A notice whose write has landed."""

    peer: PeerRef
    notice: TransferNotice


class FabricByHand:
    """The network between the transports of one process.

    `on_page` is called just before each page lands, with the write, the local page and the remote one.
    """

    def __init__(self, clock: Callable[[], float], on_page: Callable[[Flight, int, int], None] | None = None) -> None:
        self.flights: list[OnTheWay] = []
        """Writes that are not quiescent, in the order posted."""
        self.notices: list[LateNotice] = []
        """Notices that can arrive now."""
        self._clock = clock
        self._on_page = on_page
        self._ends: dict[PeerRef, InMemoryTransport] = {}

    def land(self, one: OnTheWay, pages: int | None = None) -> None:
        """Lands `pages` more pages, or all; after the last one the write is settled."""
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
                one.flight.land(receiver.layout.page_bytes, self.now(), notified=write.notice is not None)

    def fail(self, one: OnTheWay, *, after_notice: bool = False) -> None:
        """Breaks the connection of a write: its writer sees it fail, and what has not landed yet may land until `rest`.

        `after_notice`: all of it has landed and its notice has left.
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
        one.flight.future.set_exception(TransferFailed("the write failed in flight; prefill again"))

    def rest(self, one: OnTheWay) -> None:
        """Makes a write quiescent; it fails, unless its writer is dead or has seen it fail."""
        self.flights.remove(one)
        if one.orphan is None:
            one.flight.future.set_exception(TransferFailed("the write failed in flight; prefill again"))

    def hear(self, late: LateNotice, *, again: bool = False) -> None:
        """Delivers a notice; with `again` it will arrive once more."""
        if not again:
            self.notices.remove(late)
        receiver = self._ends.get(late.peer)
        if receiver is not None:
            receiver.on_notice(late.notice)

    def lose_notice(self, late: LateNotice) -> None:
        """Loses a notice; its writer assumes that it arrived."""
        self.notices.remove(late)

    def kill(self, peer: PeerRef) -> None:
        """Ends the process of `peer`. Writes to it fail; its own go on to land until `bury`."""
        end = self._ends.pop(peer, None)
        for one in self.flights:
            if one.flight.sender == peer and end is not None and not one.failed:
                one.orphan = [_bytes(end, page) for page in one.flight.write.local_pages]
        self.drop_flights(lambda flight: flight.write.peer == peer, f"{peer.worker_id} is gone")

    def bury(self, peer: PeerRef) -> None:
        """Drops what a dead process wrote and has not landed; its notices may still arrive."""
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
        """Returns the test's clock."""
        return self._clock()

    def attach(self, end: InMemoryTransport) -> None:
        """Makes a transport reachable."""
        self._ends[end.me] = end

    def detach(self, end: InMemoryTransport) -> None:
        """Makes a transport unreachable, unless another one has replaced it."""
        if self._ends.get(end.me) is end:
            del self._ends[end.me]

    def post(self, flight: Flight) -> None:
        """Adds a write to `flights`."""
        self.flights.append(OnTheWay(flight))

    def drop_flights(self, lost: Callable[[Flight], bool], why: str) -> None:
        """Removes the writes for which `lost` is true, and fails those whose writer lives."""
        dropped = [one for one in self.flights if lost(one.flight)]
        self.flights = [one for one in self.flights if not lost(one.flight)]
        for one in dropped:
            if one.orphan is None:
                one.flight.future.set_exception(TransferFailed(f"the write failed: {why}; prefill again"))


def _bytes(end: InMemoryTransport, page: int) -> bytes:
    return ctypes.string_at(end.layout.page_address(page), end.layout.page_bytes)


def _kept(one: OnTheWay) -> bytes:
    if one.orphan is None:
        raise AssertionError("a write whose writer is gone holds no bytes; use `kill`")
    return one.orphan[one.landed]
