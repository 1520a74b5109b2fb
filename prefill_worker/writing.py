"""How long hand-overs write, as that time passes: one that never ends counts as well."""

import threading
import time
from collections.abc import Callable


class WritingTime:
    """Seconds with writes under way, summed over hand-overs. Nothing ticks: what goes on is reckoned up whenever one
    begins or ends, or somebody asks. From any thread.
    """

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        self._writing = 0
        self._nanos, self._until = 0, clock_ns()

    def begin(self) -> None:
        """The first write of a hand-over none of whose writes were under way."""
        self._reckon(1)

    def end(self) -> None:
        """The last of those has settled."""
        self._reckon(-1)

    @property
    def seconds(self) -> float:
        """Until now; never less than before."""
        return self._reckon(0) / 1e9

    def _reckon(self, begun: int) -> int:
        with self._lock:
            now = self._clock_ns()
            self._nanos += self._writing * (now - self._until)
            self._until = now
            self._writing += begun
            return self._nanos
