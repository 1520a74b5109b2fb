"""Goodput: the rate of requests that met the targets of their SLO class, over a sliding window."""

from collections import deque
from collections.abc import Callable, Iterable

_BINS = 60


class Goodput:
    """The goodput of each SLO class over a sliding window, which consists of 60 bins. The `RouterMetrics` own it.

    `met` is called on the event loop; `per_second` may be called from any thread.
    """

    def __init__(self, classes: Iterable[str], window_s: float, clock: Callable[[], float]) -> None:
        """`window_s` is the window's length in seconds of `clock`.

        During the first `window_s` seconds the window extends back only to the creation of this object.
        """
        self._window_s = window_s
        self._bin_s = window_s / _BINS
        self._clock = clock
        self._born = clock()
        self._bins: dict[str, deque[tuple[int, int]]] = {name: deque() for name in classes}

    def met(self, slo_class: str) -> None:
        """Count a request that met the targets of its SLO class, in the current bin of the window."""
        number, bins = int(self._clock() / self._bin_s), self._bins[slo_class]
        if bins and bins[-1][0] == number:
            bins[-1] = (number, bins[-1][1] + 1)
        else:
            bins.append((number, 1))
            while bins[0][0] < number - _BINS:
                bins.popleft()

    def per_second(self) -> dict[str, float]:
        """Return the goodput of each class, in requests per second."""
        now = self._clock()
        seconds = min(self._window_s, max(now - self._born, self._bin_s))
        oldest = int(now / self._bin_s) - _BINS
        return {
            name: sum(count for number, count in tuple(bins) if number > oldest) / seconds
            for name, bins in self._bins.items()
        }
