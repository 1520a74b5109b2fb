"""Loads that change by the hour, and the goodput of each hour."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tandem.capacity.simulation.arrivals import Mix
from tandem.capacity.simulation.request import LoadRequest
from tandem.settings.slo import SloClass


@dataclass(frozen=True, slots=True)
class Hour:
    """A period with a constant request mix."""

    name: str
    mix: Mix


@dataclass(frozen=True, slots=True)
class Day:
    """Consecutive hours, each `seconds` long."""

    hours: Sequence[Hour]
    seconds: float
    slo: SloClass
    seed: int = 0

    def requests(self, max_context: int) -> Iterator[LoadRequest]:
        """Yields the requests of all hours, by arrival."""
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
        """Returns the number of the hour in which a request is due."""
        return min(int(due_s / self.seconds), len(self.hours) - 1)

    @property
    def end_s(self) -> float:
        """The end of the last hour."""
        return self.seconds * len(self.hours)


@dataclass(slots=True)
class Tally:
    """Requests of each hour: the number due, and the number that met their class."""

    due: list[int] = field(default_factory=list)
    met: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, hours: int) -> "Tally":
        """Returns a tally of zeros."""
        return cls([0] * hours, [0] * hours)

    def per_s(self, seconds: float) -> list[float]:
        """Returns the goodput of each hour."""
        return [round(met / seconds, 3) for met in self.met]
