"""Rates and quantiles between two scrapes, equal to Prometheus'."""

import pytest

from tandem.metrics import families as f
from tandem.metrics.exposition import Exposition
from tandem.metrics.registry import Registry
from tandem.metrics.scrape import Scrape, ScrapeInterval


def scrapes(*fill: tuple[float, ...]) -> ScrapeInterval:
    """Returns two scrapes, 2 s apart, of a process that has observed these values by then."""
    registry = Registry({"worker": "w"})
    spread, count = registry.histogram(f.INTER_TOKEN_LATENCY), registry.counter(f.SLO_MISSED, "a", "queue")
    readings = []
    for at, values in enumerate(fill):
        for value in values:
            spread.observe(value)
            count.add()
        readings.append(Scrape(Exposition(registry).render()[0].decode(), at * 2.0))
    return ScrapeInterval(*readings)


def test_what_has_happened() -> None:
    interval = scrapes((0.1,), (0.0015, 0.0015, 0.0035, 0.0035))
    assert interval.seconds == 2
    assert interval.grown(f.SLO_MISSED, slo_class="a") == 4
    assert interval.rate(f.SLO_MISSED) == 2
    assert interval.rate(f.SLO_MISSED, slo_class="b") == 0
    assert interval.mean(f.INTER_TOKEN_LATENCY) == pytest.approx(0.0025)
    assert interval.now.values(f.SLO_MISSED, "phase") == ["queue"]
    assert interval.now.total(f.INTER_TOKEN_LATENCY, "_count", worker="w") == 5


def test_quantiles() -> None:
    """Two observations are between 1 and 2 ms, two between 3 and 4 ms."""
    interval = scrapes((0.1,), (0.0015, 0.0015, 0.0035, 0.0035))
    for part, expected in ((0.25, 0.0015), (0.5, 0.002), (0.75, 0.0035), (1.0, 0.004)):
        assert interval.quantile(f.INTER_TOKEN_LATENCY, part) == pytest.approx(expected)
    beyond = scrapes((), (100.0,))
    assert beyond.quantile(f.INTER_TOKEN_LATENCY, 0.5) == f.INTER_TOKEN_LATENCY.buckets[-1]
    nothing = scrapes((0.1,), ())
    assert nothing.quantile(f.INTER_TOKEN_LATENCY, 0.5) is None
    assert nothing.mean(f.INTER_TOKEN_LATENCY) is None
    assert nothing.quantile(f.TIME_TO_FIRST_TOKEN, 0.5) is None


def test_a_process_that_started_again_goes_on_from_nothing() -> None:
    later, before = scrapes((0.1,), (0.1,)).before, scrapes((0.1, 0.1), ()).now
    assert ScrapeInterval(before, later).grown(f.SLO_MISSED) == 1


def test_a_series_that_is_new_has_not_grown() -> None:
    """A worker's series under a new role is an example: its counters began before."""
    now = scrapes((0.1,), ()).now
    assert ScrapeInterval(Scrape("", 0.0), now).grown(f.SLO_MISSED) == 0
