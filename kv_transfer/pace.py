"""When to look again at writes in flight: looking costs the interpreter that engine and event loop share, and every
moment between the end of a write and the look that finds it is added to somebody's hand-over."""

import time

FIRST_LOOK_S, LAST_LOOK_S = 20e-6, 500e-6
"""Shortest and longest wait. Some wires move on only when somebody looks, so even a long write is looked at often."""
_WEIGHT = 0.3
"""Of the newest rate in the running mean."""
_EARLY = 0.9
"""Part of the expected time after which to begin looking closely."""


class Pace:
    """Expects writes to end one after the other at the rate of those before; later than expected, waits double."""

    def __init__(self) -> None:
        self._rate: float | None = None
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
            rate = moved / (now - self._since)
            self._rate = rate if self._rate is None else self._rate + _WEIGHT * (rate - self._rate)
        self._since = now
        self._look_s = FIRST_LOOK_S

    def wait_s(self, expected: int) -> float:
        """Until the next look at a write of `expected` bytes, the oldest one."""
        if self._rate is not None:
            left = self._since + _EARLY * expected / self._rate - time.monotonic()
            if left > self._look_s:
                return min(left, LAST_LOOK_S)
        return self._look_s

    def in_vain(self) -> None:
        """A look found nothing new."""
        self._look_s = min(2 * self._look_s, LAST_LOOK_S)
