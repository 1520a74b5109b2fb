"""The time at which pages are safe from a writer that is assumed dead, or that reports a failed write.

A death is an assumption: a worker that is partitioned looks like a dead one and may go on to write. What is possible
depends on what this host's kernel says of its process (`processes.py`):

    alive      nothing is safe, however long it stalls: it may be stopped amid a write, or before it posts one
    dead       what it had sent lands within the grace period
    unknown    permission to write expires (`Fence.window_s`), and the writer begins nothing after that; what it
               began in time lands within the grace period

The grace period counts only time in which this worker's transport polled: bytes in its socket buffers land when it
polls. A failed write leaves as much data behind as one of a dead process, though its writer lives and begins nothing
more. Between processes of one host nothing else can be in transit. Over a network the last case is a bound, not a
proof: a switch or a retransmission may hold bytes longer than the grace period, which is longer for remote writers for
that reason; and so may a writer that is stopped after it has read the clock, before or amid its write.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from tandem.protocol.messages import PeerRef

ProcessAlive = Callable[[PeerRef], bool | None]
"""Returns True if the process of this incarnation lives, False if it has ended, None if that is unknown."""


def process_unknown(_peer: PeerRef) -> None:
    """Return None: the process cannot be observed from this host."""


@dataclass(frozen=True, slots=True)
class Fence:
    """The policy that quarantines pages that a writer may still write."""

    window_s: float
    """The time for which a permission lets the writer begin writes, in seconds."""
    grace_s: Callable[[PeerRef], float]
    """The time within which what it has begun lands, in seconds."""
    transport_poll_s: Callable[[], float]
    """The clock of the grace period (`Receiver.transport_poll_s`)."""
    process_alive: ProcessAlive = process_unknown


class Exposure:
    """The writes that the writer of one lease may still do to its pages. Times are the lease table's, in seconds."""

    def __init__(self, fence: Fence, writer: PeerRef) -> None:
        self._fence, self._writer = fence, writer
        self._permitted_at = -math.inf
        self._grace_s: float | None = None
        self._safe_at: float | None = None
        self._writer_stopped = False

    def permit(self, now: float) -> None:
        """Permits the writer to begin writes for `window_s` from now on."""
        self._permitted_at = now

    def believe_dead(self) -> None:
        """Marks the writer as dead, which fixes its grace period."""
        if self._grace_s is None:
            self._grace_s = self._fence.grace_s(self._writer)

    def writer_stopped(self) -> None:
        """Records the writer's statement that it begins nothing more; what it had begun may still land."""
        self.believe_dead()
        self._writer_stopped = True

    def is_safe(self, now: float, lives: ProcessAlive) -> bool:
        """Returns True if nothing of a writer that is dead or begins no more can land.

        Starts the grace period when due.
        """
        if self._grace_s is None:
            return False
        if not self._writer_stopped and self._may_begin(now, lives(self._writer)):
            self._safe_at = None
            return False
        transport_poll_s = self._fence.transport_poll_s()
        if self._safe_at is None:
            self._safe_at = transport_poll_s + self._grace_s
        return transport_poll_s >= self._safe_at

    def _may_begin(self, now: float, alive: bool | None) -> bool:
        return bool(alive) or (alive is None and now < self._permitted_at + self._fence.window_s)
