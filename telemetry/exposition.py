"""From a board to what Prometheus reads, by prometheus-client; and several processes' texts put together into one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from telemetry.board import Board, Example, Snapshot, Spread
from telemetry.family import Kind

TEXT = "text/plain; version=0.0.4; charset=utf-8"
"""The format that `merge` takes and gives."""


class BoardCollector(Collector):
    """Gives prometheus-client what a board holds, and what the operating system says of the process, all of it under
    the process's labels.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self._process = ProcessCollector(registry=None)

    def collect(self) -> Iterator[Metric]:
        labels = dict(self._board.labels)
        for snapshot in self._board.snapshots():
            yield _metric(snapshot, labels)
        for metric in self._process.collect():
            for sample in metric.samples:
                sample.labels.update(labels)
            yield metric


class Exposition:
    """What one process answers to a scrape."""

    def __init__(self, board: Board) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(BoardCollector(board))

    def render(self, accept: str = TEXT) -> tuple[bytes, str]:
        """The metrics in the format that a scraper accepts, and that format's name."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type


def merge(texts: Iterable[str]) -> str:
    """Texts of several processes as one: each family once, with the series of all. Nothing is added up."""
    heads: dict[str, list[str]] = {}
    series: dict[str, list[str]] = {}
    for text in texts:
        name = ""
        for line in text.splitlines():
            if line.startswith("# "):
                name = line.split(" ", 3)[2]
                if line not in (known := heads.setdefault(name, [])):
                    known.append(line)
            elif line:
                series.setdefault(name, []).append(line)
    return "".join("\n".join([*heads[name], *lines, ""]) for name, lines in series.items())


def _metric(snapshot: Snapshot, labels: dict[str, str]) -> Metric:
    family = snapshot.family
    base = {name: value for name, value in labels.items() if name not in family.labels}
    names, fixed = [*base, *family.labels], list(base.values())
    if family.kind is Kind.HISTOGRAM:
        histogram = HistogramMetricFamily(family.full_name, family.help, labels=names)
        for values, spread in snapshot.spreads.items():
            histogram.add_metric([*fixed, *values], _buckets(spread), spread.total)
        return histogram
    make = CounterMetricFamily if family.kind is Kind.COUNTER else GaugeMetricFamily
    metric = make(family.full_name, family.help, labels=names)
    for values, number in snapshot.numbers.items():
        metric.add_metric([*fixed, *values], number)
    return metric


def _buckets(spread: Spread) -> list[tuple[str, float] | tuple[str, float, Exemplar]]:
    bounds = [*map(str, spread.bounds), "+Inf"]
    rows = zip(bounds, map(float, accumulate(spread.counts)), spread.examples, strict=True)
    return [(bound, count) if example is None else (bound, count, _exemplar(example)) for bound, count, example in rows]


def _exemplar(example: Example) -> Exemplar:
    return Exemplar(dict(example.labels), example.value, example.unix_s)
