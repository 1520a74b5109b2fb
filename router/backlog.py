"""Seconds of work that wait, and answers that are to follow it, by when each part must start."""

from dataclasses import dataclass
from typing import NamedTuple

_BUCKET_S = 0.05


class Ahead(NamedTuple):
    """Work that comes before something else."""

    seconds: float = 0.0
    answers: int = 0
    """That begin with it."""


@dataclass(slots=True)
class _Bucket:
    parts: int = 0
    seconds: float = 0.0
    answers: int = 0


class Backlog:
    """Sums by time, in buckets: how much is more urgent than something else is known without looking at requests."""

    def __init__(self) -> None:
        self._buckets: dict[int, _Bucket] = {}

    def add(self, start_by_s: float, seconds: float, answers: int = 0) -> None:
        """Work of `seconds` must start by then, and so many answers follow it."""
        bucket = self._buckets.setdefault(int(start_by_s / _BUCKET_S), _Bucket())
        bucket.parts += 1
        bucket.seconds += seconds
        bucket.answers += answers

    def remove(self, start_by_s: float, seconds: float, answers: int = 0) -> None:
        """It was added like this and waits no more."""
        place = int(start_by_s / _BUCKET_S)
        bucket = self._buckets[place]
        bucket.parts -= 1
        bucket.seconds -= seconds
        bucket.answers -= answers
        if not bucket.parts:  # no rest of a rounding stays
            del self._buckets[place]

    def before(self, start_by_s: float) -> Ahead:
        """All work that must start no later, to a bucket."""
        last = int(start_by_s / _BUCKET_S)
        earlier = [bucket for place, bucket in self._buckets.items() if place <= last]
        return Ahead(sum(each.seconds for each in earlier), sum(each.answers for each in earlier))
