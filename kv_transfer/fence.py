"""When pages are safe again from a writer that is believed dead, or says that a write of it failed.

A death is a belief: a worker that is cut off looks like a dead one and may go on to write. What can be done depends on
what this host's kernel says of its process (`processes.py`):

    it lives      nothing is safe, however long it stands still: it may be stopped amid a write, or before its post
    it is dead    what it had sent lands in the grace
    nobody knows  permission to write expires (`Fence.window_s`), and the writer begins nothing past it; what it began
                  in time lands in the grace

The grace counts only time in which this worker's transport listened: bytes in its socket buffers land when it looks.
A write that failed leaves as much behind as one of a dead process, though its writer lives and begins nothing more.
Between processes of one host nothing else is on the way. Over a network the last line is a bound, not a proof: a switch
or a retransmission may hold bytes longer than the grace for distant writers, which is longer for that reason; and so
may a writer that is stopped after its look at the clock, before or amid its write.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from wire.messages import PeerRef

Lives = Callable[[PeerRef], bool | None]
"""Whether the process of this run lives; None = nobody knows."""


def nobody_knows(_peer: PeerRef) -> None:
    """Of a process that cannot be seen from here."""


@dataclass(frozen=True, slots=True)
class Fence:
    """What keeps pages apart that a writer may write to."""

    window_s: float
    """For how long a permission lets it begin to write."""
    grace_s: Callable[[PeerRef], float]
    """How long what it has begun may take to land."""
    listened_s: Callable[[], float]
    """The clock of the grace: see `Receiver.listened_s`."""
    lives: Lives = nobody_knows


class Exposure:
    """What one lease's writer may do to its pages. Times are the lease table's, in seconds."""

    def __init__(self, fence: Fence, writer: PeerRef) -> None:
        self._fence, self._writer = fence, writer
        self._permitted_at = -math.inf
        self._grace_s: float | None = None
        self._safe_at: float | None = None
        self._begins_no_more = False

    def permit(self, now: float) -> None:
        """From now on the writer may begin to write for `window_s`."""
        self._permitted_at = now

    def believe_dead(self) -> None:
        """From now on it matters when the pages are safe from it."""
        if self._grace_s is None:
            self._grace_s = self._fence.grace_s(self._writer)

    def begins_no_more(self) -> None:
        """The writer says so; what it had begun may still land, whether it lives or not."""
        self.believe_dead()
        self._begins_no_more = True

    def is_safe(self, now: float, lives: Lives) -> bool:
        """Whether nothing lands any more of a writer that is believed dead or begins no more; starts the grace when it
        is due.
        """
        if self._grace_s is None:
            return False
        if not self._begins_no_more and self._may_begin(now, lives(self._writer)):
            self._safe_at = None
            return False
        listened_s = self._fence.listened_s()
        if self._safe_at is None:
            self._safe_at = listened_s + self._grace_s
        return listened_s >= self._safe_at

    def _may_begin(self, now: float, alive: bool | None) -> bool:
        return bool(alive) or (alive is None and now < self._permitted_at + self._fence.window_s)
