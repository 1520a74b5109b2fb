"""When to look again at writes in flight: looking costs the interpreter that engine and event loop share, and every
moment between the end of a write and the look that finds it is added to somebody's hand-over."""

import ctypes
import sys
import time

FIRST_LOOK_S, LAST_LOOK_S = 20e-6, 500e-6
"""Shortest and longest wait. Some wires move on only when somebody looks, so even a long write is looked at often."""
_FORGET = 0.98
"""What is left of the best rate with each write that was slower: a look that came late must not excuse the next."""
_EARLY, _LATE = 0.9, 2.0
"""Parts of the expected time from which on, and until which, to look closely."""
_PATIENCE = 0.5
"""Of the time that a write is late, how long to wait until the next look."""
_PR_SET_TIMERSLACK = 29
_SLACK_NS = 1000


def wait_precisely() -> None:
    """Let this thread's short waits end when they should: Linux rings up to 50 µs late to save energy."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_SLACK_NS), 0, 0, 0)


class Pace:
    """Expects writes to end one after the other, each at the best rate of late. Looks closely around that moment, and
    the rarer the later a write is.

    A write ended somewhere between two looks. Taking the later one for its end would make late looks expect late ends,
    and so look late again.
    """

    def __init__(self) -> None:
        self._rate = 0.0
        self._since = 0.0
        self._posted = 0.0
        self._looked = 0.0

    def began(self, others: int) -> None:
        """A write was posted behind `others`."""
        self._posted = time.monotonic()
        if not others:
            self._since = self._looked = self._posted

    def ended(self, moved: int) -> None:
        """The oldest write is over, as this look found, and moved so many bytes."""
        ended = (max(self._looked, self._since) + time.monotonic()) / 2
        if moved and ended > self._since:
            self._rate = max(moved / (ended - self._since), self._rate * _FORGET)
        self._since = ended

    def wait_s(self, expected: int) -> float:
        """Until the next look at a write of `expected` bytes, the oldest one, behind one that found it in flight."""
        self._looked = now = time.monotonic()
        taken = now - self._since
        due = expected / self._rate if self._rate else 0.0
        # One that hangs must not make those late that were posted behind it.
        late = min(taken - _LATE * due, now - self._posted)
        wait = _EARLY * due - taken if taken < _EARLY * due else _PATIENCE * late
        return min(max(wait, FIRST_LOOK_S), LAST_LOOK_S)
