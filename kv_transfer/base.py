"""The transfer seam. A prefill worker has a `Sender`, a decode worker a `Receiver`; both come from one `Transport`.

Ownership: the sender only reads its own pages and writes the peer's pages it was allotted; it never frees. Local pages
must stay untouched until the write is settled (`done` or `failed` — and quiet: no byte of them is read any more). The
peer's pages are quiet, too, when it is done; of one that failed, bytes may lie in the peer's buffers and land later,
so the sender says that one has failed and the peer keeps its pages apart for a while (`fence.py`).

Threads: every method may be called from any thread and returns without waiting for the network, except `close`.
Callbacks run on the transport's own thread and must return at once.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from wire.messages import PeerDescription, PeerRef, TransferNotice

NoticeHandler = Callable[[TransferNotice], None]


def whenever() -> float:
    """Of a write that may begin at any time."""
    return math.inf


@dataclass(frozen=True, slots=True)
class WriteDone:
    """A settled write: bytes moved, how long it took from its beginning to completion (ns), and when that was (Unix
    ns).
    """

    bytes: int
    duration_nanos: int
    ended_nanos: int

    @property
    def begun_nanos(self) -> int:
        """Unix ns."""
        return self.ended_nanos - self.duration_nanos


@dataclass(frozen=True, slots=True)
class PageWrite:
    """Write my `local_pages` onto `peer`'s `remote_pages`, one to one; then, if given, deliver `notice`.

    It begins once those `behind` which it goes have landed, and never if one of them has not; they are this sender's,
    too. The notice arrives after every byte of all of these. A write that has not begun by `begin_by`
    (`time.monotonic`) never does: that is for how long the peer has given its pages. It is asked when the write could
    begin, on any thread.
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
        """Learn how to reach a peer; a later incarnation of the same worker replaces the earlier one."""

    @abstractmethod
    def remove_peer(self, peer: PeerRef) -> None:
        """Forget this incarnation of a peer and earlier ones: metadata, descriptor lists, connections. Unknown peers
        and later incarnations are left alone. The same incarnation may be added again.

        That its process is over is a belief: writes in flight to it fail, but as any other no sooner than they are
        quiet, for the peer may live, and their bytes and notices be on the way.
        """

    @abstractmethod
    def write(self, write: PageWrite, deadline_s: float) -> "Future[WriteDone]":
        """Post a write. The future ends with `WriteDone`, or `TransferFailed` once the write is known to be quiet here.

        Past `deadline_s` (seconds from now) a write that has not begun fails, though no sooner than those that it goes
        behind are over, and one in flight fails when it comes to rest; unless its notice has left, for then the peer
        goes on with the request. Cancelling the future does
        nothing: a posted write is always waited for.
        """


class Receiver(ABC):
    """Learns of writes into this worker's pages."""

    @abstractmethod
    def describe(self) -> PeerDescription:
        """How peers reach this worker's pool."""

    @abstractmethod
    def expect(self, leases: int) -> None:
        """How many leases may still see a notice or a write: 0 lets the transport rest, more makes it listen closely.

        Revoked leases whose writer is not yet quiet count: over some wires a write only ends while the receiver looks.
        """

    @abstractmethod
    def listened_s(self) -> float:
        """How long this end has looked for what comes in, in seconds; grows as monotonic time does, except while it
        does not look.

        What a dead process sent lies in this host's buffers until somebody looks.
        """


class Transport(Sender, Receiver):
    """Both ends over one registration of the page pool."""

    backend: str
    """Name of the back end, e.g. `UCX`."""

    @abstractmethod
    def transport_name(self) -> str:
        """Back end and the wires it found to its peers, for logs and `tandem status`, e.g. `UCX (cma)`."""

    def transport_kinds(self) -> str:
        """The same without any peer's name, for metrics: it has few values, however many peers come and go."""
        return self.backend

    def facts(self) -> tuple[tuple[str, str], ...]:
        """For the handshake, (name, value) in words: what the transports of two workers must share."""
        return ()

    def open_ports(self) -> tuple[str, ...]:
        """host:port of each TCP socket at which the transport listens, to whoever reaches it."""
        return ()

    def warnings(self) -> tuple[str, ...]:
        """What is slower than it could be, and what to do, in sentences; for logs and `tandem status`."""
        return ()

    @abstractmethod
    def close(self) -> None:
        """Wait for writes in flight (bounded), deregister, stop the thread. Idempotent."""
