"""Virtual time: what happens, happens in the order of its moments."""

import heapq
from collections.abc import Callable


class VirtualClock:
    """Seconds that pass from one planned call to the next. Calls of one moment run in the order they were planned."""

    def __init__(self) -> None:
        self.now = 0.0
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._planned = 0

    def __call__(self) -> float:
        return self.now

    def at(self, moment: float, call: Callable[[], None]) -> None:
        """`call` at `moment`; now, if that is over."""
        self._planned += 1
        heapq.heappush(self._calls, (moment if moment > self.now else self.now, self._planned, call))

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """`call` in so many seconds."""
        self.at(self.now + seconds, call)

    def run(self, until: float = float("inf")) -> None:
        """Until nothing is planned any more, or time is up."""
        calls = self._calls
        while calls and calls[0][0] <= until:
            self.now, _, call = heapq.heappop(calls)
            call()
