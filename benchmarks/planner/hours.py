"""Loads that swing: what an hour asks, and how a run of several hours went."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from router.slo import SloClass
from simulation.arrivals import Mix
from simulation.request import LoadRequest


@dataclass(frozen=True, slots=True)
class Hour:
    """A stretch of time in which the mix stays as it is."""

    name: str
    mix: Mix


@dataclass(frozen=True, slots=True)
class Day:
    """Hours that follow each other, each `seconds` long."""

    hours: Sequence[Hour]
    seconds: float
    slo: SloClass
    seed: int = 0

    def requests(self, max_context: int) -> Iterator[LoadRequest]:
        """Of all hours, by rising moment."""
        for number, hour in enumerate(self.hours):
            yield from hour.mix.requests(
                self.seconds,
                self.slo,
                max_context,
                seed=self.seed + number,
                start_s=number * self.seconds,
                key=number * 10**9,
            )

    def hour_of(self, due_s: float) -> int:
        """The number of the hour in which a request is due."""
        return min(int(due_s / self.seconds), len(self.hours) - 1)

    @property
    def end_s(self) -> float:
        return self.seconds * len(self.hours)


@dataclass(slots=True)
class Tally:
    """Requests of each hour: how many were due, and how many met their class."""

    due: list[int] = field(default_factory=list)
    met: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, hours: int) -> "Tally":
        return cls([0] * hours, [0] * hours)

    def per_s(self, seconds: float) -> list[float]:
        """Goodput of each hour."""
        return [round(met / seconds, 3) for met in self.met]
