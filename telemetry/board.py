"""One process's numbers: written where things happen, read when somebody asks.

Writing is a few additions to plain attributes, so that an engine's thread can do it every step. Nothing is locked: each
series has one writer, and a reader beside it sees every number whole, though perhaps an observation apart from another.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from telemetry.family import Family, Kind

Labels = tuple[str, ...]
"""Values of a family's labels, in their order."""
Reading = Mapping[Labels, float]
"""A number for each set of labels."""
Facts = Mapping[Family, float | Reading]
"""Families as they are now; a bare number is of one without labels of its own."""


class Count:
    """A number that grows, or a gauge."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, amount: float = 1.0) -> None:
        """Grow by `amount`, >= 0."""
        self.value += amount


@dataclass(frozen=True, slots=True)
class Example:
    """One observation of a bucket, and where to read more of it (an exemplar of OpenMetrics)."""

    value: float
    unix_s: float
    labels: Mapping[str, str]
    """Names and values together at most `EXAMPLE_CHARS` characters."""


EXAMPLE_CHARS = 128
"""OpenMetrics 1.0 allows no more."""


class Spread:
    """How many observations lie between bounds; one above the other, the last one beyond all of them."""

    __slots__ = ("bounds", "counts", "examples", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.examples: list[Example | None] = [None] * (len(bounds) + 1)
        """Of each bucket, where somebody keeps any; scraped in OpenMetrics' format alone."""
        self.total = 0.0

    def place(self, value: float) -> int:
        """The bucket of an observation."""
        return bisect_left(self.bounds, value)

    def observe(self, value: float, times: int = 1) -> None:
        """`value` was seen so many times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        """All observations."""
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One family as it is now."""

    family: Family
    numbers: Reading
    spreads: Mapping[Labels, Spread]


class Board:
    """All families of one process. Written by whoever got a cell; `snapshots` reads, on any thread."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        """`labels` of the process, which every series gets as long as it lives. What may change is a series of its own:
        with another label counters would begin anew.
        """
        self.labels = labels
        self._counts: dict[Family, dict[Labels, Count]] = {}
        self._spreads: dict[Family, dict[Labels, Spread]] = {}
        self._sources: list[Callable[[], Facts]] = []

    def count(self, family: Family, *values: str) -> Count:
        """The cell of a counter with these label values; the same one each time. It is exported from now on."""
        _check(family, Kind.COUNTER, values)
        return self._counts.setdefault(family, {}).setdefault(values, Count())

    def spread(self, family: Family, *values: str) -> Spread:
        """The same of a histogram."""
        _check(family, Kind.HISTOGRAM, values)
        return self._spreads.setdefault(family, {}).setdefault(values, Spread(family.buckets))

    def read(self, source: Callable[[], Facts]) -> None:
        """Counters and gauges that somebody else keeps: asked for at each scrape."""
        self._sources.append(source)

    def snapshots(self) -> Iterable[Snapshot]:
        """Every family, as it is now."""
        for family, cells in tuple(self._counts.items()):
            yield Snapshot(family, {labels: cell.value for labels, cell in tuple(cells.items())}, {})
        for source in self._sources:
            for family, found in source().items():
                yield Snapshot(family, found if isinstance(found, Mapping) else {(): found}, {})
        for family, spreads in tuple(self._spreads.items()):
            yield Snapshot(family, {}, dict(spreads))


def _check(family: Family, kind: Kind, values: Labels) -> None:
    if family.kind is not kind or len(values) != len(family.labels):
        raise ValueError(f"{family.name} is a {family.kind} of {family.labels}, not a {kind} of {values}")
