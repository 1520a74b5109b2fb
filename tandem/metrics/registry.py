"""The metrics of one process: written where events happen, and read at each scrape.

A write is a few additions to plain attributes, cheap enough for the engine's thread in every step. There are no locks:
each series has one writer, and a concurrent reader never sees a partial number, though a histogram's sum and count may
differ by one observation.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from tandem.metrics.family import Family, Kind

Labels = tuple[str, ...]
"""The label values of a series, in the order of the family's label names."""
Reading = Mapping[Labels, float]
"""The values of a family's series, by label values."""
Facts = Mapping[Family, float | Reading]
"""Current values by family; a plain number is the value of a family without labels."""


class Counter:
    """One series of a counter, which only increases, or of a gauge."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, amount: float = 1.0) -> None:
        """Add `amount`, >= 0."""
        self.value += amount


@dataclass(frozen=True, slots=True)
class Exemplar:
    """An example observation of a histogram bucket, with labels that lead to its trace (OpenMetrics exemplar)."""

    value: float
    unix_s: float
    labels: Mapping[str, str]
    """Label names and values, in total at most `EXEMPLAR_CHARS` characters."""


EXEMPLAR_CHARS = 128
"""Maximum total characters of an exemplar's labels in OpenMetrics 1.0."""


class Histogram:
    """Counts of observations by bucket; `bounds` are ascending upper bounds, and the last bucket is unbounded."""

    __slots__ = ("bounds", "counts", "exemplars", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.exemplars: list[Exemplar | None] = [None] * (len(bounds) + 1)
        """The exemplar of each bucket, None = none; exported in the OpenMetrics format only."""
        self.total = 0.0

    def place(self, value: float) -> int:
        """Return the index of the bucket for an observed value."""
        return bisect_left(self.bounds, value)

    def observe(self, value: float, times: int = 1) -> None:
        """Record `times` observations of `value`."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        """The number of observations."""
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The values of one family at the time of a scrape."""

    family: Family
    numbers: Reading
    histograms: Mapping[Labels, Histogram]


class Registry:
    """All metrics of one process. The owner of each series writes to it; `snapshots` may be called on any thread."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        """Create the registry; every series has the `labels` of the process.

        A label whose value can change must be the label of a family instead: with a new value, counters start from 0.
        """
        self.labels = labels
        self._counters: dict[Family, dict[Labels, Counter]] = {}
        self._histograms: dict[Family, dict[Labels, Histogram]] = {}
        self._sources: list[Callable[[], Facts]] = []

    def counter(self, family: Family, *values: str) -> Counter:
        """Return the counter or gauge with these label values, the same object at each call.

        It is exported from now on.
        """
        _check(family, Kind.COUNTER, values)
        return self._counters.setdefault(family, {}).setdefault(values, Counter())

    def histogram(self, family: Family, *values: str) -> Histogram:
        """Return the histogram with these label values, the same object at each call; it is exported from now on."""
        _check(family, Kind.HISTOGRAM, values)
        return self._histograms.setdefault(family, {}).setdefault(values, Histogram(family.buckets))

    def read(self, source: Callable[[], Facts]) -> None:
        """Add a function that returns values of counters and gauges kept by other objects.

        It is called at each scrape.
        """
        self._sources.append(source)

    def snapshots(self) -> Iterable[Snapshot]:
        """Yield the current values of every family."""
        for family, cells in tuple(self._counters.items()):
            yield Snapshot(family, {labels: cell.value for labels, cell in tuple(cells.items())}, {})
        for source in self._sources:
            for family, series in source().items():
                yield Snapshot(family, series if isinstance(series, Mapping) else {(): series}, {})
        for family, histograms in tuple(self._histograms.items()):
            yield Snapshot(family, {}, dict(histograms))


def _check(family: Family, kind: Kind, values: Labels) -> None:
    if family.kind is not kind or len(values) != len(family.labels):
        raise ValueError(f"{family.name} is a {family.kind} of {family.labels}, not a {kind} of {values}")
