"""Poll intervals for writes in flight.

Each poll takes the interpreter lock from the engine and the event loop, but a late poll delays the hand-over: the time
from the end of a write to the poll that detects it is added to the hand-over's duration.
"""

import ctypes
import sys
import time

FIRST_LOOK_S, LAST_LOOK_S = 20e-6, 500e-6
"""The minimum and maximum wait between polls, in seconds.

Some UCX transports make progress only when polled, so even a long write is polled often.
"""
_FORGET = 0.98
"""The factor by which the best rate is multiplied after each slower write.

It is near 1, because a write may only seem slow after a late poll, and a lower rate delays the next polls.
"""
_EARLY, _LATE = 0.9, 2.0
"""Polls are frequent between these multiples of a write's expected duration."""
_POLL_BACKOFF = 0.5
"""The wait until the next poll of a late write, as a fraction of the time by which the write is late."""
_PR_SET_TIMERSLACK = 29
_SLACK_NS = 1000


def wait_precisely() -> None:
    """Make short waits of the calling thread end on time, by lowering Linux's default timer slack of 50 µs."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_SLACK_NS), 0, 0, 0)


class PollBackoff:
    """The poll interval for writes that end one after the other.

    The end of each write is predicted from the best recent rate. Polls are frequent around the predicted end, and
    become rarer the later a write is. A write is assumed to have ended halfway between the last poll that found it in
    flight and the poll that found it complete. If the time of the latter poll were taken instead, a write would seem to
    take longer after a late poll, and the next polls would be later still.
    """

    def __init__(self) -> None:
        self._rate = 0.0
        self._since = 0.0
        self._posted = 0.0
        self._looked = 0.0

    def began(self, others: int) -> None:
        """Record that a write was posted while `others` other writes were in flight."""
        self._posted = time.monotonic()
        if not others:
            self._since = self._looked = self._posted

    def ended(self, moved: int) -> None:
        """Record that the oldest write was found to be complete, after it moved `moved` bytes."""
        ended = (max(self._looked, self._since) + time.monotonic()) / 2
        if moved and ended > self._since:
            self._rate = max(moved / (ended - self._since), self._rate * _FORGET)
        self._since = ended

    def wait_s(self, expected: int) -> float:
        """Return the seconds until the next poll; the oldest write, of `expected` bytes, is still in flight."""
        self._looked = now = time.monotonic()
        taken = now - self._since
        due = expected / self._rate if self._rate else 0.0
        # A write that hangs must not delay the polls of those posted after it.
        late = min(taken - _LATE * due, now - self._posted)
        wait = _EARLY * due - taken if taken < _EARLY * due else _POLL_BACKOFF * late
        return min(max(wait, FIRST_LOOK_S), LAST_LOOK_S)
