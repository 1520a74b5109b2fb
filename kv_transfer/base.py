"""The transfer interface: a prefill worker uses a `Sender`, a decode worker a `Receiver`; a `Transport` is both.

Ownership: the sender only reads its own pages, and writes the pages of the peer that were allocated to it; it frees
none. Local pages must not change until the write has ended, successfully or not. A write ends only once it is
quiescent, which means that no byte of the local pages is read any more. When a write has succeeded, the peer's pages
are quiescent too. After a failed write, bytes may still be in the peer's buffers and land later, so the sender reports
the failure and the peer quarantines its pages for a grace period (`fence.py`).

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
    """Return infinity: the `begin_by` of a write that may begin at any time."""
    return math.inf


@dataclass(frozen=True, slots=True)
class WriteDone:
    """A successful write: bytes moved, time from begin to completion (ns), and time of completion (Unix ns)."""

    bytes: int
    duration_nanos: int
    ended_nanos: int

    @property
    def begun_nanos(self) -> int:
        """The time at which the write began, in Unix ns."""
        return self.ended_nanos - self.duration_nanos


@dataclass(frozen=True, slots=True)
class PageWrite:
    """A request to write `local_pages` to `peer`'s `remote_pages`, one to one, and then to deliver `notice`.

    The write begins once all writes in `after`, which are of the same sender, have completed, and never if one of them
    failed. The notice arrives after every byte of all of these writes. A write that has not begun by `begin_by`
    (`time.monotonic`) never begins: the peer's permission to write ends then. `begin_by` is called when the write could
    begin, on any thread.
    """

    peer: PeerRef
    local_pages: Sequence[int]
    remote_pages: Sequence[int]
    notice: TransferNotice | None = None
    begin_by: Callable[[], float] = whenever
    after: "Sequence[Future[WriteDone]]" = ()


class Sender(ABC):
    """Writes this worker's pages to the memory of peers."""

    @abstractmethod
    def add_peer(self, description: PeerDescription) -> None:
        """Register a peer. A later incarnation of the same worker replaces an earlier one."""

    @abstractmethod
    def remove_peer(self, peer: PeerRef) -> None:
        """Remove this incarnation of a peer and all earlier ones: metadata, descriptor lists and connections.

        Unknown peers and later incarnations are not affected. The same incarnation may be added again. Writes in flight
        to the peer fail, but as always no sooner than they are quiescent: the end of its process is only assumed. The
        process may be alive, and bytes and notices may still reach it.
        """

    @abstractmethod
    def write(self, write: PageWrite, deadline_s: float) -> "Future[WriteDone]":
        """Post a write.

        The future ends with `WriteDone`, or with `TransferFailed` once the write is quiescent on this side.

        `deadline_s` is in seconds from now. A write that has not begun by then fails, though not before the writes in
        `after` have ended. A write that is in flight then fails when it is quiescent, unless its notice has left: the
        peer then continues the request. Cancelling the future has no effect, because a posted write must be waited for.
        """


class Receiver(ABC):
    """Receives notices of writes to this worker's pages."""

    @abstractmethod
    def describe(self) -> PeerDescription:
        """Return what peers need to reach this worker's pool."""

    @abstractmethod
    def expect(self, leases: int) -> None:
        """Set the number of leases for which a notice or a write may still come.

        With 0 the transport polls rarely, otherwise fast. Revoked leases whose writer is not quiescent yet count: over
        some transports a write completes only while the receiver polls.
        """

    @abstractmethod
    def transport_poll_s(self) -> float:
        """Return for how long this side has polled for incoming data, in seconds.

        The value grows like monotonic time, except while nothing polls: data of a process that has died stays in this
        host's buffers until the next poll.
        """


class Transport(Sender, Receiver):
    """Sender and receiver over one registration of the page pool."""

    backend: str
    """The name of the back end, e.g. `UCX`."""

    @abstractmethod
    def transport_name(self) -> str:
        """Return the back end and the UCX transports to its peers, e.g. `UCX (cma)`, for logs and `tandem status`."""

    def transport_kinds(self) -> str:
        """Return the back end and the UCX transports without peers, for metrics.

        There are few different values, however many peers come and go.
        """
        return self.backend

    def facts(self) -> tuple[tuple[str, str], ...]:
        """Return the (name, value) facts that two workers' transports must share, for the handshake."""
        return ()

    def open_ports(self) -> tuple[str, ...]:
        """Return host:port of each TCP socket on which the transport listens."""
        return ()

    def warnings(self) -> tuple[str, ...]:
        """Return sentences about what is slower than necessary and what to do, for logs and `tandem status`."""
        return ()

    @abstractmethod
    def close(self) -> None:
        """Wait for writes in flight (bounded), deregister the pool and stop the thread. Idempotent."""
