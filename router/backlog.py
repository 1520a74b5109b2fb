"""Seconds of work that wait, and answers that are to follow it, by when each part must start."""

_BUCKET_S = 0.05


class Backlog:
    """Sums by time, in buckets: how much is more urgent than something else is known without looking at requests."""

    def __init__(self) -> None:
        self._buckets: dict[int, float] = {}
        self._counts: dict[int, int] = {}
        self._answers: dict[int, int] = {}

    def add(self, start_by_s: float, seconds: float, answers: int = 0) -> None:
        """Work of `seconds` must start by then, and so many answers follow it."""
        bucket = int(start_by_s / _BUCKET_S)
        self._answers[bucket] = self._answers.get(bucket, 0) + answers
        self._buckets[bucket] = self._buckets.get(bucket, 0.0) + seconds
        self._counts[bucket] = self._counts.get(bucket, 0) + 1

    def remove(self, start_by_s: float, seconds: float, answers: int = 0) -> None:
        """It was added like this and waits no more."""
        bucket = int(start_by_s / _BUCKET_S)
        self._counts[bucket] -= 1
        if self._counts[bucket]:
            self._buckets[bucket] -= seconds
            self._answers[bucket] -= answers
        else:  # no rest of a rounding stays
            del self._buckets[bucket], self._counts[bucket], self._answers[bucket]

    def before(self, start_by_s: float) -> float:
        """Seconds of all work that must start no later, to a bucket."""
        last = int(start_by_s / _BUCKET_S)
        return sum(seconds for bucket, seconds in self._buckets.items() if bucket <= last)

    def answers_before(self, start_by_s: float) -> int:
        """Answers that follow it."""
        last = int(start_by_s / _BUCKET_S)
        return sum(answers for bucket, answers in self._answers.items() if bucket <= last)
