"""When to look again at writes in flight: looking costs the interpreter that engine and event loop share, and every
moment between the end of a write and the look that finds it is added to somebody's hand-over."""

import time

FIRST_LOOK_S, LAST_LOOK_S = 20e-6, 500e-6
"""Shortest and longest wait. Some wires move on only when somebody looks, so even a long write is looked at often."""
_FORGET = 0.98
"""What is left of the best rate with each write that was slower: a look that came late must not excuse the next."""
_EARLY, _LATE = 0.9, 2.0
"""Parts of the expected time from which on, and until which, to look closely."""
_PATIENCE = 0.5
"""Of the time that a write is late, how long to wait until the next look."""


class Pace:
    """Expects writes to end one after the other, each at the best rate of late. Looks closely around that moment, and
    the rarer the later a write is."""

    def __init__(self) -> None:
        self._rate = 0.0
        self._since = 0.0
        self._posted = 0.0

    def began(self, others: int) -> None:
        """A write was posted behind `others`."""
        self._posted = time.monotonic()
        if not others:
            self._since = self._posted

    def ended(self, moved: int) -> None:
        """The oldest write is over, and moved so many bytes."""
        now = time.monotonic()
        if moved and now > self._since:
            self._rate = max(moved / (now - self._since), self._rate * _FORGET)
        self._since = now

    def wait_s(self, expected: int) -> float:
        """Until the next look at a write of `expected` bytes, the oldest one."""
        now = time.monotonic()
        taken = now - self._since
        due = expected / self._rate if self._rate else 0.0
        # One that hangs must not make those late that were posted behind it.
        late = min(taken - _LATE * due, now - self._posted)
        wait = _EARLY * due - taken if taken < _EARLY * due else _PATIENCE * late
        return min(max(wait, FIRST_LOOK_S), LAST_LOOK_S)
