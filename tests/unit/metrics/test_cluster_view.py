"""The view of a cluster is computed from few of the samples of a scrape."""

from __future__ import annotations

from tandem.metrics.cluster_view import cluster_view, view_scrape
from tandem.metrics.exposition import Exposition, merge
from tandem.metrics.families import FAMILIES
from tandem.metrics.family import Kind
from tandem.metrics.registry import Registry
from tandem.metrics.scrape import Scrape, ScrapeInterval

LABELS = {"phase": "decode", "state": "advertised", "outcome": "met", "role": "both", "worker": "worker-0"}
"""Values of labels that the view distinguishes."""


def text_of(scale: int) -> str:
    """Returns the text of a router and a worker with a value in each family, different for each, times `scale`."""
    texts = []
    for labels in ({"model": "m", "role": "router", "worker": "router"}, {"model": "m", "worker": "worker-0"}):
        registry = Registry(labels)
        for number, family in enumerate(FAMILIES, 1):
            values = tuple(LABELS.get(label, label) for label in family.labels)
            if family.kind is Kind.HISTOGRAM:
                registry.histogram(family, *values).observe(family.buckets[0] * 1.5, scale * number)
            elif family.kind is Kind.COUNTER:
                registry.counter(family, *values).add(scale * number)
            else:
                registry.read(lambda family=family, values=values, number=number: {family: {values: number / 1e3}})
        texts.append(Exposition(registry).render()[0].decode())
    return merge(texts)


def test_a_view_reads_only_the_samples_that_are_parsed_for_it() -> None:
    texts = text_of(1), text_of(3)
    before, now = (Scrape(text, float(at_s)) for at_s, text in enumerate(texts))
    whole = cluster_view(ScrapeInterval(before, now))
    assert whole.workers
    assert whole.classes
    assert all(latency.p99_s for latency in whole.latencies)
    before, now = (view_scrape(text, float(at_s)) for at_s, text in enumerate(texts))
    assert cluster_view(ScrapeInterval(before, now)) == whole
