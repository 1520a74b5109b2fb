"""Seconds of work that wait, by when each part must start."""

_BUCKET_S = 0.05


class Backlog:
    """Sums by time, in buckets: how much is more urgent than something else is known without looking at requests."""

    def __init__(self) -> None:
        self._buckets: dict[int, float] = {}
        self._counts: dict[int, int] = {}

    def add(self, start_by_s: float, seconds: float) -> None:
        """Work of `seconds` must start by then."""
        bucket = int(start_by_s / _BUCKET_S)
        self._buckets[bucket] = self._buckets.get(bucket, 0.0) + seconds
        self._counts[bucket] = self._counts.get(bucket, 0) + 1

    def remove(self, start_by_s: float, seconds: float) -> None:
        """It was added like this and waits no more."""
        bucket = int(start_by_s / _BUCKET_S)
        self._counts[bucket] -= 1
        if self._counts[bucket]:
            self._buckets[bucket] -= seconds
        else:  # no rest of a rounding stays
            del self._buckets[bucket], self._counts[bucket]

    def before(self, start_by_s: float) -> float:
        """Seconds of all work that must start no later, to a bucket."""
        last = int(start_by_s / _BUCKET_S)
        return sum(seconds for bucket, seconds in self._buckets.items() if bucket <= last)
