"""Virtual time: planned calls run in the order of their times."""

import heapq
from collections.abc import Callable


class VirtualClock:
    """A clock in seconds that advances from planned call to planned call; calls of equal time run in planning order."""

    def __init__(self) -> None:
        self.now = 0.0
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._planned = 0

    def __call__(self) -> float:
        """Returns the present time."""
        return self.now

    def at(self, moment: float, call: Callable[[], None]) -> None:
        """Plans `call` for time `moment`, or for now if that has passed."""
        self._planned += 1
        heapq.heappush(self._calls, (moment if moment > self.now else self.now, self._planned, call))

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Plans `call` in `seconds`."""
        self.at(self.now + seconds, call)

    def run(self, until: float = float("inf")) -> None:
        """Runs planned calls until none is left or the time `until` is reached."""
        calls = self._calls
        while calls and calls[0][0] <= until:
            self.now, _, call = heapq.heappop(calls)
            call()
