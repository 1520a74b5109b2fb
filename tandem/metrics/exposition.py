"""Exports a registry in the Prometheus formats with prometheus-client, and merges the exports of several processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from tandem.metrics.family import Kind
from tandem.metrics.registry import Exemplar as BucketExemplar
from tandem.metrics.registry import Histogram, Registry, Snapshot

TEXT = "text/plain; version=0.0.4; charset=utf-8"
"""The content type of the text format that `merge` reads and returns."""


class RegistryCollector(Collector):
    """Collects a registry's metrics and the process's metrics of the operating system, with the process's labels."""

    def __init__(self, registry: Registry) -> None:
        self._metrics = registry
        self._process = ProcessCollector(registry=None)

    def collect(self) -> Iterator[Metric]:
        """Yield the registry's families, then the process's own (CPU time, memory, open files)."""
        labels = dict(self._metrics.labels)
        for snapshot in self._metrics.snapshots():
            yield _metric(snapshot, labels)
        for metric in self._process.collect():
            for sample in metric.samples:
                sample.labels.update(labels)
            yield metric


class Exposition:
    """Renders the response of one process to a scrape."""

    def __init__(self, registry: Registry) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(RegistryCollector(registry))

    def render(self, accept: str = TEXT) -> tuple[bytes, str]:
        """Return the metrics in the format that the `Accept` header prefers, and the content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type


def merge(texts: Iterable[str]) -> str:
    """Merge the texts of several processes: each family appears once, with the series of all processes.

    Series are not summed.
    """
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
        histograms = HistogramMetricFamily(family.full_name, family.help, labels=names)
        for values, histogram in snapshot.histograms.items():
            histograms.add_metric([*fixed, *values], _buckets(histogram), histogram.total)
        return histograms
    make = CounterMetricFamily if family.kind is Kind.COUNTER else GaugeMetricFamily
    metric = make(family.full_name, family.help, labels=names)
    for values, number in snapshot.numbers.items():
        metric.add_metric([*fixed, *values], number)
    return metric


def _buckets(histogram: Histogram) -> list[tuple[str, float] | tuple[str, float, Exemplar]]:
    bounds = [*map(str, histogram.bounds), "+Inf"]
    rows = zip(bounds, map(float, accumulate(histogram.counts)), histogram.exemplars, strict=True)
    return [
        (bound, count) if exemplar is None else (bound, count, _exemplar(exemplar)) for bound, count, exemplar in rows
    ]


def _exemplar(exemplar: BucketExemplar) -> Exemplar:
    return Exemplar(dict(exemplar.labels), exemplar.value, exemplar.unix_s)
