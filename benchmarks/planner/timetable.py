"""The schedule of a run with a time limit: the length of its hours."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from tandem.protocol.errors import InvalidArgument

END_S = 8.0
"""Seconds reserved for the end: stopping clusters, and the result."""
STATIC_PART = 2 / 3
"""Length of the oracles' hours, as a share of the day's."""
HOUR_MIN_S, HOUR_MAX_S = 8.0, 90.0


@dataclass(slots=True)
class Timetable:
    """The schedule of a run of `seconds` that began at `began_s` of the clock."""

    seconds: float
    began_s: float
    clock: Callable[[], float] = time.monotonic

    @property
    def passed_s(self) -> float:
        """Elapsed seconds of the run."""
        return self.clock() - self.began_s

    def static_seconds(self, hours: int, loads: int, start_s: float, overhead_s: float) -> float:
        """Returns the length of each of `loads` loads before the day.

        The day's cluster takes `start_s` to start; loads and day take `overhead_s` besides the period in which requests
        arrive. InvalidArgument if the time is too short.
        """
        hour_s = self._share(hours + STATIC_PART * loads, start_s + (loads + 1) * overhead_s)
        if hour_s < HOUR_MIN_S:
            least = self.seconds + (HOUR_MIN_S - hour_s) * (hours + STATIC_PART * loads)
            raise InvalidArgument("--seconds", f"{self.seconds:g} leaves hours of {hour_s:.1f} s; {least:.0f} would do")
        return round(STATIC_PART * hour_s, 1)

    def hour_seconds(self, hours: int, overhead_s: float) -> float:
        """Returns the length of each of the next `hours` hours, at least `HOUR_MIN_S`."""
        return round(max(self._share(hours, overhead_s), HOUR_MIN_S), 1)

    def say(self, text: str) -> None:
        """Prints a line with the elapsed time."""
        print(f"[{self.passed_s:6.1f} s] {text}", flush=True)

    def _share(self, parts: float, overhead_s: float) -> float:
        return min((self.seconds - self.passed_s - END_S - overhead_s) / parts, HOUR_MAX_S)
