"""A run that must be over in time: how long its hours may be, and where it is."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from wire.errors import InvalidArgument

END_S = 8.0
"""Left for the end: clusters that stop, and the result."""
STATIC_PART = 2 / 3
"""What the oracles look at, in parts of an hour of the day."""
HOUR_MIN_S, HOUR_MAX_S = 8.0, 90.0


@dataclass(slots=True)
class Timetable:
    """Of a run that began at `began_s` of the clock and has `seconds`."""

    seconds: float
    began_s: float
    clock: Callable[[], float] = time.monotonic

    @property
    def passed_s(self) -> float:
        return self.clock() - self.began_s

    def static_seconds(self, hours: int, loads: int, start_s: float, beside_s: float) -> float:
        """Of each of so many loads that go before the day, whose cluster takes `start_s` to start; loads and the day
        take `beside_s` beside the time in which requests come. InvalidArgument if that is too little.
        """
        hour_s = self._share(hours + STATIC_PART * loads, start_s + (loads + 1) * beside_s)
        if hour_s < HOUR_MIN_S:
            least = self.seconds + (HOUR_MIN_S - hour_s) * (hours + STATIC_PART * loads)
            raise InvalidArgument("--seconds", f"{self.seconds:g} leaves hours of {hour_s:.1f} s; {least:.0f} would do")
        return round(STATIC_PART * hour_s, 1)

    def hour_seconds(self, hours: int, beside_s: float) -> float:
        """Of each of so many hours that come now, `HOUR_MIN_S` at least."""
        return round(max(self._share(hours, beside_s), HOUR_MIN_S), 1)

    def say(self, text: str) -> None:
        """For who waits."""
        print(f"[{self.passed_s:6.1f} s] {text}", flush=True)

    def _share(self, parts: float, beside_s: float) -> float:
        return min((self.seconds - self.passed_s - END_S - beside_s) / parts, HOUR_MAX_S)
