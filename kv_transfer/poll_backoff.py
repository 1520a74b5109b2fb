"""Poll intervals for writes in flight.

Each poll takes the interpreter lock from the engine and the event loop. But the time from the end of a write to the
poll that finds it is added to the hand-over.
"""

import ctypes
import sys
import time

FIRST_LOOK_S, LAST_LOOK_S = 20e-6, 500e-6
"""The shortest and longest wait between polls, in seconds.

Some UCX transports make progress only when polled, so even a long write is polled often."""
_FORGET = 0.98
"""The factor by which the best rate decays with each slower write: a late poll must not excuse the next one."""
_EARLY, _LATE = 0.9, 2.0
"""Parts of the expected time between which polls are fast."""
_POLL_BACKOFF = 0.5
"""The wait until the next poll, as a part of the time by which a write is late."""
_PR_SET_TIMERSLACK = 29
_SLACK_NS = 1000


def wait_precisely() -> None:
    """Make short waits of this thread end on time: Linux's default timer slack is 50 µs."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_SLACK_NS), 0, 0, 0)


class PollBackoff:
    """The poll interval for writes that end one after the other, each expected at the best recent rate.

    Polls are fast around the expected end, and the later a write is, the rarer they are. A write ended at some time
    between two polls, and is assumed to have ended in the middle: if the later poll counted, late polls would make
    later ends expected, and so cause later polls.
    """

    def __init__(self) -> None:
        self._rate = 0.0
        self._since = 0.0
        self._posted = 0.0
        self._looked = 0.0

    def began(self, others: int) -> None:
        """Record that a write was posted after `others` writes that are in flight."""
        self._posted = time.monotonic()
        if not others:
            self._since = self._looked = self._posted

    def ended(self, moved: int) -> None:
        """Record that the oldest write was found complete and moved `moved` bytes."""
        ended = (max(self._looked, self._since) + time.monotonic()) / 2
        if moved and ended > self._since:
            self._rate = max(moved / (ended - self._since), self._rate * _FORGET)
        self._since = ended

    def wait_s(self, expected: int) -> float:
        """Return the seconds until the next poll, after the oldest write, of `expected` bytes, was found in flight."""
        self._looked = now = time.monotonic()
        taken = now - self._since
        due = expected / self._rate if self._rate else 0.0
        # A write that hangs must not delay the polls of those posted after it.
        late = min(taken - _LATE * due, now - self._posted)
        wait = _EARLY * due - taken if taken < _EARLY * due else _POLL_BACKOFF * late
        return min(max(wait, FIRST_LOOK_S), LAST_LOOK_S)
