"""Decides whether requests wait while the only worker of a role is replaced."""

from __future__ import annotations

import math

from router.placement.worker_state import Clock


class Recovery:
    """The times in which no request can be served, but will be once an expected worker serves."""

    def __init__(self, longest_s: float, clock: Clock) -> None:
        """Requests wait for at most `longest_s` seconds, by `clock`; 0 = never."""
        self._longest_s = longest_s
        self._clock = clock
        self._began_s = math.inf
        self._ended_s = -math.inf
        self.waits = False
        """True while requests wait."""

    def update(self, *, recovering: bool) -> bool:
        """Follow the workers: `recovering` is True while requests can be served only by an expected worker.

        Returns True if `waits` has changed. Called after each change of the workers, and periodically.
        """
        now = self._clock()
        self._began_s = min(self._began_s, now) if recovering else math.inf
        waited, self.waits = self.waits, now - self._began_s < self._longest_s and recovering
        if waited and not self.waits:
            self._ended_s = now
        return waited != self.waits

    def waited_s(self, since_s: float) -> float:
        """Return for how long a request waits that was queued at `since_s`, without times in which all wait."""
        return 0.0 if self.waits else self._clock() - max(since_s, self._ended_s)
