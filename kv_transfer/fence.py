"""Decides when pages are safe from a writer that is assumed dead, or that has reported a failed write.

A death is an assumption: a worker that is cut off from this one looks dead and may continue to write. The decision
depends on what this host's kernel reports of the writer's process (`processes.py`):

    alive      nothing is safe, however long the process stalls: it may be stopped during a write, or before it posts
               a write
    dead       the data that it had sent lands within the grace period
    unknown    its permission to write expires (`Fence.window_s`), after which it begins no write; the writes that it
               began in time land within the grace period

The grace period counts only time in which this worker's transport polled, because bytes in its socket buffers land when
it polls. A failed write leaves as much data in transit as a dead process, although its writer is alive and begins no
further write. Between processes of one host, nothing can be in transit outside these buffers. Over a network, the grace
period is a bound and no proof: a switch or a retransmission may hold bytes longer, so remote writers have a longer
grace period. It is no proof either if the writer's process cannot be observed: if that process is stopped between its
last look at the clock and the end of its write, the write may land after the grace period.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from tandem.protocol.messages import PeerRef

ProcessAlive = Callable[[PeerRef], bool | None]
"""Returns True if the process of this incarnation is alive, False if it has ended, None if that is unknown."""


def process_unknown(_peer: PeerRef) -> None:
    """Return None, which means that the process cannot be observed from this host."""


@dataclass(frozen=True, slots=True)
class Fence:
    """The facts by which `OutstandingWrites` decides whether pages are safe from a writer assumed dead or stopped.

    They are the two time limits, the clock of the grace period and the probe of the writer's process. The module's
    docstring has the rules.
    """

    window_s: float
    """The duration of a write permission in seconds: after it has expired, the writer begins no further write."""
    grace_s: Callable[[PeerRef], float]
    """Returns a writer's grace period in seconds: the time within which the writes that it has begun land."""
    transport_poll_s: Callable[[], float]
    """The clock of the grace period (`Receiver.transport_poll_s`)."""
    process_alive: ProcessAlive = process_unknown


class OutstandingWrites:
    """Tracks, for one lease, whether the writer may still write to the pages, and since when it cannot.

    Times are in seconds by the lease table's clock. Owned by the lease's entry in the lease table, and guarded by the
    table's lock.
    """

    def __init__(self, fence: Fence, writer: PeerRef) -> None:
        self._fence, self._writer = fence, writer
        self._permitted_at = -math.inf
        self._grace_s: float | None = None
        self._safe_at: float | None = None
        self._writer_stopped = False

    def permit(self, now: float) -> None:
        """Permit the writer to begin writes for `window_s` seconds from `now`."""
        self._permitted_at = now

    def believe_dead(self) -> None:
        """Assume that the writer is dead, and set its grace period."""
        if self._grace_s is None:
            self._grace_s = self._fence.grace_s(self._writer)

    def writer_stopped(self) -> None:
        """Record that the writer begins no further write. The writes that it has begun may still land."""
        self.believe_dead()
        self._writer_stopped = True

    def is_safe(self, now: float, process_alive: ProcessAlive) -> bool:
        """Return True if the writer is assumed dead or has stopped, and no write of it can land from now on.

        Starts the grace period once the writer cannot begin a write.
        """
        if self._grace_s is None:
            return False
        # The grace period starts over: a writer whose process is alive, or whose window is open, may begin a write.
        if not self._writer_stopped and self._may_begin(now, process_alive(self._writer)):
            self._safe_at = None
            return False
        transport_poll_s = self._fence.transport_poll_s()
        if self._safe_at is None:
            self._safe_at = transport_poll_s + self._grace_s
        return transport_poll_s >= self._safe_at

    def _may_begin(self, now: float, alive: bool | None) -> bool:
        # If the process cannot be observed, only the end of its permission shows that it begins no write.
        return bool(alive) or (alive is None and now < self._permitted_at + self._fence.window_s)
