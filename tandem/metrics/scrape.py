"""Parses scraped metrics, sums series, and computes the increase of counters between two scrapes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from prometheus_client.parser import text_string_to_metric_families

from tandem.metrics.family import Family

_Series = tuple[Mapping[str, str], float]


class Scrape:
    """The parsed metrics of one or several processes at one time."""

    def __init__(self, text: str, at_s: float) -> None:
        """Parse the text of a scrape that was taken at the time `at_s`, in seconds on any clock."""
        self.at_s = at_s
        self._series: dict[str, list[_Series]] = defaultdict(list)
        for metric in text_string_to_metric_families(text):
            for sample in metric.samples:
                self._series[sample.name].append((sample.labels, sample.value))

    def total(self, family: Family, suffix: str = "", **labels: str) -> float:
        """Return the sum over the series that have these labels; 0 if there are none.

        `suffix` is `_count` or `_sum` for a histogram.
        """
        return sum(value for _, value in self.matching(family.full_name + suffix, labels))

    def values(self, family: Family, label: str, **labels: str) -> list[str]:
        """Return the distinct values of `label` in the series that have these labels, in order of appearance."""
        return list(dict.fromkeys(have[label] for have, _ in self.matching(family.full_name, labels) if label in have))

    def matching(self, name: str, labels: Mapping[str, str]) -> list[_Series]:
        """Return labels and value of each series of this name that has these labels."""
        return [series for series in self._series.get(name, ()) if labels.items() <= series[0].items()]


@dataclass(frozen=True, slots=True)
class ScrapeInterval:
    """The interval between two scrapes of the same processes.

    If a process restarted in between, the counter's new value counts as its increase. A series that is missing from the
    first scrape has no increase yet.
    """

    before: Scrape
    now: Scrape

    @property
    def seconds(self) -> float:
        """Length of the interval in seconds."""
        return self.now.at_s - self.before.at_s

    def grown(self, family: Family, suffix: str = "", **labels: str) -> float:
        """Return the increase of a counter, summed over the series that have these labels."""
        return sum(growth for _, growth in self._growth(family.full_name + suffix, labels))

    def rate(self, family: Family, suffix: str = "", **labels: str) -> float:
        """Return the increase per second of a counter, summed over the series that have these labels."""
        return self.grown(family, suffix, **labels) / self.seconds if self.seconds > 0 else 0.0

    def mean(self, family: Family, **labels: str) -> float | None:
        """Return the mean of a histogram's observations in the interval; None if there were none."""
        count = self.grown(family, "_count", **labels)
        return self.grown(family, "_sum", **labels) / count if count else None

    def quantile(self, family: Family, part: float, **labels: str) -> float | None:
        """Return a quantile of a histogram's observations in the interval; None if there were none.

        As in Prometheus' `histogram_quantile`, it is interpolated linearly within a bucket, and at most the last bound.
        """
        counts: dict[float, float] = defaultdict(float)
        for have, growth in self._growth(family.full_name + "_bucket", labels):
            counts[float(have["le"])] += growth
        wanted = part * max(counts.values(), default=0.0)
        if not wanted:
            return None
        for (low, below), (high, upto) in pairwise([(0.0, 0.0), *sorted(counts.items())]):
            if upto >= wanted:
                return low if high == math.inf else low + (high - low) * (wanted - below) / (upto - below)
        return None

    def _growth(self, name: str, labels: Mapping[str, str]) -> list[_Series]:
        earlier = {_key(have): value for have, value in self.before.matching(name, labels)}
        increases = []
        for have, value in self.now.matching(name, labels):
            start = earlier.get(_key(have), value)
            increases.append((have, value - start if value >= start else value))
        return increases


def _key(labels: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    return frozenset(labels.items())
