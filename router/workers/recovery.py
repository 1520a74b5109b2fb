"""Decides whether requests wait or fail while the only worker of a role is being replaced."""

from __future__ import annotations

import math

from router.placement.worker_state import Clock


class Recovery:
    """Tracks recoveries: the periods in which no request can be served until an expected worker is ready.

    The dispatcher owns it; all calls are on the event loop.
    """

    def __init__(self, longest_s: float, clock: Clock) -> None:
        """`longest_s` is the maximum time that requests wait for a worker, in seconds of `clock`; 0 = no waiting."""
        self._longest_s = longest_s
        self._clock = clock
        self._began_s = math.inf
        self._ended_s = -math.inf
        self.waits = False
        """True while requests wait for an expected worker."""

    def update(self, *, recovering: bool) -> bool:
        """Update `waits`, and return True if it has changed; called periodically and after each change of the workers.

        `recovering` is True while requests can be served only once an expected worker is ready.
        """
        now = self._clock()
        self._began_s = min(self._began_s, now) if recovering else math.inf
        waited, self.waits = self.waits, now - self._began_s < self._longest_s and recovering
        if waited and not self.waits:
            self._ended_s = now
        return waited != self.waits

    def waited_s(self, since_s: float) -> float:
        """Return the seconds since a request was queued (`since_s`) or the last recovery ended, whichever is later.

        Returns 0 during a recovery. So the queue timeout does not count time in which no request could be served.
        """
        return 0.0 if self.waits else self._clock() - max(since_s, self._ended_s)
