"""When to look again at writes in flight: looking costs the interpreter that engine and event loop share, and every
moment between the end of a write and the look that finds it is added to somebody's hand-over."""

import time

FIRST_LOOK_S, LAST_LOOK_S = 20e-6, 500e-6
"""Shortest and longest wait. Some wires move on only when somebody looks, so even a long write is looked at often."""
_FORGET = 0.98
"""What is left of the best rate with each write that was slower: a look that came late must not excuse the next."""
_EARLY = 0.5
"""Part of the expected time after which to begin looking closely."""


class Pace:
    """Expects writes to end one after the other, half as long as the best of late took; after that, waits double."""

    def __init__(self) -> None:
        self._rate = 0.0
        self._since = 0.0
        self._look_s = FIRST_LOOK_S

    def began(self, others: int) -> None:
        """A write was posted behind `others`."""
        self._look_s = FIRST_LOOK_S
        if not others:
            self._since = time.monotonic()

    def ended(self, moved: int) -> None:
        """The oldest write is over, and moved so many bytes."""
        now = time.monotonic()
        if moved and now > self._since:
            self._rate = max(moved / (now - self._since), self._rate * _FORGET)
        self._since = now
        self._look_s = FIRST_LOOK_S

    def wait_s(self, expected: int) -> float:
        """Until the next look at a write of `expected` bytes, the oldest one."""
        if self._rate:
            left = self._since + _EARLY * expected / self._rate - time.monotonic()
            if left > self._look_s:
                return min(left, LAST_LOOK_S)
        return self._look_s

    def in_vain(self) -> None:
        """A look found nothing new."""
        self._look_s = min(2 * self._look_s, LAST_LOOK_S)
