"""The transfer interface: a prefill worker uses a `Sender`, a decode worker a `Receiver`; a `Transport` is both.

Ownership: the sender reads only its own pages and writes only the peer's pages that were allocated to it; it frees
none. Local pages must not change until the write has ended, successfully or not. A write ends only once it is
quiescent, which means that the transport no longer reads the local pages. When a write has succeeded, the peer's pages
no longer change either. After a failed write, bytes may still be in the peer's buffers and land later, so the sender
reports the failure and the peer quarantines its pages for a grace period (`fence.py`).

Threads: every method may be called from any thread and returns without waiting for the network, except `close`.
Callbacks run on the transport's own thread and must return at once.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from kv_transfer.rank_plan import ByteRange
from tandem.protocol.messages import PeerDescription, PeerRef, TransferNotice

NoticeHandler = Callable[[TransferNotice], None]


def whenever() -> float:
    """Return infinity; a write with `begin_by=whenever` may begin at any time."""
    return math.inf


@dataclass(frozen=True, slots=True)
class WriteDone:
    """The result of a successful write: bytes moved, duration in ns, and time of completion in Unix ns."""

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

    The write begins once all writes in `after` have completed; it fails if one of them fails. The writes in `after`
    must be of the same sender. The notice arrives after every byte of all of these writes. `begin_by` returns the time
    (`time.monotonic`) at which the peer's permission to write ends: a write that has not begun by then fails.
    `begin_by` is called when the write could begin, on any thread. `groups` has the number of each page's group of
    layers; empty = all pages are of the first group.
    """

    peer: PeerRef
    local_pages: Sequence[int]
    remote_pages: Sequence[int]
    notice: TransferNotice | None = None
    begin_by: Callable[[], float] = whenever
    after: "Sequence[Future[WriteDone]]" = ()
    groups: Sequence[int] = ()


PageRanges = Sequence[Sequence[ByteRange]]
"""The ranges of a page that a write copies, for each order of the elements that pages have; empty = whole pages."""


def ranges_of(write: PageWrite, ranges: PageRanges, index: int) -> Sequence[ByteRange]:
    """Return the ranges that are copied of the page with this index in the write; empty = the whole page."""
    return ranges[write.groups[index] if write.groups else 0] if ranges else ()


def written_bytes(write: PageWrite, ranges: PageRanges, page_bytes: int) -> int:
    """Return the number of bytes that a write copies of pages with `page_bytes` bytes."""
    if not ranges:
        return len(write.local_pages) * page_bytes
    sizes = [sum(part.bytes for part in parts) for parts in ranges]
    return sum(sizes[group] for group in write.groups or [0] * len(write.local_pages))


class Sender(ABC):
    """Writes this worker's pages to the memory of peers."""

    @abstractmethod
    def add_peer(self, description: PeerDescription) -> None:
        """Register a peer. A later incarnation of the same worker replaces an earlier one."""

    @abstractmethod
    def remove_peer(self, peer: PeerRef) -> None:
        """Remove this incarnation of a peer and all earlier ones: metadata, descriptor lists and connections.

        Unknown peers and later incarnations are not affected. The same incarnation may be added again. Writes in flight
        to the peer fail, but only once they are quiescent, because the peer is only assumed dead: its process may be
        alive, and bytes and notices may still reach it.
        """

    @abstractmethod
    def write(self, write: PageWrite, deadline_s: float) -> "Future[WriteDone]":
        """Post a write, and return a future that ends with its result.

        The result is `WriteDone`, or the error `TransferFailed`, which is set only once the write is quiescent on this
        side.

        `deadline_s` is in seconds from now. A write that has not begun at the deadline fails, but only after the writes
        in `after` have ended. A write that is in flight at the deadline fails once it is quiescent, unless its notice
        has been sent: it then succeeds, because the peer continues the request. Cancelling the future has no effect:
        every posted write is waited for.
        """


class Receiver(ABC):
    """Receives notices of writes to this worker's pages."""

    @abstractmethod
    def describe(self) -> PeerDescription:
        """Return the description with which peers can write to this worker's pool."""

    @abstractmethod
    def expect(self, leases: int) -> None:
        """Set the number of leases for which a notice or a write may still arrive.

        With 0 the transport polls rarely, otherwise often, because over some transports a write completes only while
        the receiver polls. The number includes revoked leases whose writer is not quiescent yet.
        """

    @abstractmethod
    def transport_poll_s(self) -> float:
        """Return the total time during which this side has polled for incoming data, in seconds.

        The value grows like monotonic time, but stands still while the transport does not poll: data of a process that
        has died stays in this host's buffers until the next poll.
        """


class Transport(Sender, Receiver):
    """A sender and a receiver that share one registration of the page pool."""

    backend: str
    """The name of the back end, e.g. `UCX`."""

    @abstractmethod
    def transport_name(self) -> str:
        """Return the back end and the UCX transports that its peers use, for logs and `tandem status`.

        For example `UCX (cma)`.
        """

    def transport_kinds(self) -> str:
        """Return the back end and the kinds of UCX transports in use, without peers, as a label for metrics.

        The number of different values stays small, however many peers come and go.
        """
        return self.backend

    def facts(self) -> tuple[tuple[str, str], ...]:
        """Return the (name, value) facts that must be equal on two workers; they are part of the handshake."""
        return ()

    def open_ports(self) -> tuple[str, ...]:
        """Return host:port of each TCP socket on which the transport listens."""
        return ()

    def silent_s(self) -> float:
        """Return for how many seconds a rank in another process has been silent; 0 if none is.

        Notices to a silent rank may have arrived without having been read.
        """
        return 0.0

    def warnings(self) -> tuple[str, ...]:
        """Return warnings about slow transports to peers, with advice, for logs and `tandem status`."""
        return ()

    @abstractmethod
    def close(self) -> None:
        """Wait for a bounded time for writes in flight, deregister the pool and stop the thread. Idempotent."""


class RankTransport(Transport):
    """The transport of one rank of a worker, which may copy parts of pages."""

    @abstractmethod
    def add_peer(self, description: PeerDescription, ranges: PageRanges = ()) -> None:
        """Register a rank of a peer: writes to it copy these ranges of each page, or whole pages if there are none.

        `PageWrite.groups` of a write to it then has the number of each page's order in `ranges`.
        """
