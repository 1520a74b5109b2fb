"""The transfer interface: a prefill worker uses a `Sender`, a decode worker a `Receiver`; a `Transport` is both.

Ownership: the sender only reads its own pages and writes the peer's pages that it was allotted; it never frees any.
Local pages must not change until the write has settled, as done or failed; it settles only once it is quiescent, which
means that no byte of them is read any more. The peer's pages are quiescent, too, when the write is done. Of a failed
write, bytes may still be in the peer's buffers and land later, so the sender reports the failure and the peer
quarantines its pages for a grace period (`fence.py`).

Threads: every method may be called from any thread and returns without waiting for the network, except `close`.
Callbacks run on the transport's own thread and must return at once.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from tandem.protocol.messages import PeerDescription, PeerRef, TransferNotice

NoticeHandler = Callable[[TransferNotice], None]


def whenever() -> float:
    """Returns infinity: the `begin_by` of a write that may begin at any time."""
    return math.inf


@dataclass(frozen=True, slots=True)
class WriteDone:
    """A settled write: bytes moved, time from begin to completion (ns), and time of completion (Unix ns)."""

    bytes: int
    duration_nanos: int
    ended_nanos: int

    @property
    def begun_nanos(self) -> int:
        """The time at which the write began, in Unix ns."""
        return self.ended_nanos - self.duration_nanos


@dataclass(frozen=True, slots=True)
class PageWrite:
    """A request to write `local_pages` onto `peer`'s `remote_pages`, one to one, then to deliver `notice`.

    The write begins once all writes in `behind`, of this sender too, have completed, and never if one of them failed.
    The notice arrives after every byte of all of these. A write that has not begun by `begin_by` (`time.monotonic`)
    never does: the peer's permission to write ends then. `begin_by` is called when the write could begin, on any
    thread.
    """

    peer: PeerRef
    local_pages: Sequence[int]
    remote_pages: Sequence[int]
    notice: TransferNotice | None = None
    begin_by: Callable[[], float] = whenever
    behind: "Sequence[Future[WriteDone]]" = ()


class Sender(ABC):
    """Writes this worker's pages into peers' memory."""

    @abstractmethod
    def add_peer(self, description: PeerDescription) -> None:
        """Registers a peer; a later incarnation of the same worker replaces the earlier one."""

    @abstractmethod
    def remove_peer(self, peer: PeerRef) -> None:
        """Forgets this incarnation of a peer and all earlier ones: metadata, descriptor lists, connections.

        Unknown peers and later incarnations are left alone. The same incarnation may be added again. Writes in flight
        to the peer fail, but like any other no sooner than they are quiescent: that its process has ended is only
        assumed, it may live, and bytes and notices may still reach it.
        """

    @abstractmethod
    def write(self, write: PageWrite, deadline_s: float) -> "Future[WriteDone]":
        """Posts a write; the future ends with `WriteDone`, or with `TransferFailed` once it is quiescent here.

        Past `deadline_s` (seconds from now) a write that has not begun fails, though not before those in `behind` are
        over, and one in flight fails when it is quiescent; unless its notice has left, because then the peer continues
        the request. Cancelling the future has no effect: a posted write is always waited for.
        """


class Receiver(ABC):
    """Receives notices of writes into this worker's pages."""

    @abstractmethod
    def describe(self) -> PeerDescription:
        """Returns what peers need to reach this worker's pool."""

    @abstractmethod
    def expect(self, leases: int) -> None:
        """Sets the number of leases that may still see a notice or a write.

        With 0 the transport idles, else it polls fast.

        Revoked leases whose writer is not yet quiescent count: over some transports a write completes only while the
        receiver polls.
        """

    @abstractmethod
    def transport_poll_s(self) -> float:
        """Returns for how long this end has polled for incoming data, in seconds.

        It grows as monotonic time does, except while nothing polls: data sent by a process that has died stays in this
        host's buffers until the next poll.
        """


class Transport(Sender, Receiver):
    """Sender and receiver over one registration of the page pool."""

    backend: str
    """The name of the back end, e.g. `UCX`."""

    @abstractmethod
    def transport_name(self) -> str:
        """Returns the back end and the UCX transports to its peers, for logs and `tandem status`, e.g. `UCX (cma)`."""

    def transport_kinds(self) -> str:
        """Returns the same without peers' names, for metrics: few values, no matter how many peers come and go."""
        return self.backend

    def facts(self) -> tuple[tuple[str, str], ...]:
        """Returns the (name, value) facts for the handshake that two workers' transports must share."""
        return ()

    def open_ports(self) -> tuple[str, ...]:
        """Returns host:port of each TCP socket on which the transport listens."""
        return ()

    def warnings(self) -> tuple[str, ...]:
        """Returns sentences about what is slower than it could be and what to do, for logs and `tandem status`."""
        return ()

    @abstractmethod
    def close(self) -> None:
        """Waits for writes in flight (bounded), deregisters the pool and stops the thread. Idempotent."""
