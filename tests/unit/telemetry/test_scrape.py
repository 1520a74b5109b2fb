"""Rates and quantiles between two scrapes, as Prometheus would have them."""

import pytest

from telemetry import families as f
from telemetry.board import Board
from telemetry.exposition import Exposition
from telemetry.scrape import Scrape, Stretch


def scrapes(*fill: tuple[float, ...]) -> Stretch:
    """Two moments, 2 s apart, of a process that saw these values by then, after those of the first."""
    board = Board({"worker": "w"})
    spread, count = board.spread(f.INTER_TOKEN_LATENCY), board.count(f.SLO_MISSED, "a", "queue")
    found = []
    for at, values in enumerate(fill):
        for value in values:
            spread.observe(value)
            count.add()
        found.append(Scrape(Exposition(board).render()[0].decode(), at * 2.0))
    return Stretch(*found)


def test_what_has_happened() -> None:
    stretch = scrapes((0.1,), (0.0015, 0.0015, 0.0035, 0.0035))
    assert stretch.seconds == 2
    assert stretch.grown(f.SLO_MISSED, slo_class="a") == 4
    assert stretch.rate(f.SLO_MISSED) == 2
    assert stretch.rate(f.SLO_MISSED, slo_class="b") == 0
    assert stretch.mean(f.INTER_TOKEN_LATENCY) == pytest.approx(0.0025)
    assert stretch.now.values(f.SLO_MISSED, "phase") == ["queue"]
    assert stretch.now.total(f.INTER_TOKEN_LATENCY, "_count", worker="w") == 5


def test_quantiles() -> None:
    """Two observations between 1 and 2 ms, two between 3 and 4."""
    stretch = scrapes((0.1,), (0.0015, 0.0015, 0.0035, 0.0035))
    for part, expected in ((0.25, 0.0015), (0.5, 0.002), (0.75, 0.0035), (1.0, 0.004)):
        assert stretch.quantile(f.INTER_TOKEN_LATENCY, part) == pytest.approx(expected)
    beyond = scrapes((), (100.0,))
    assert beyond.quantile(f.INTER_TOKEN_LATENCY, 0.5) == f.INTER_TOKEN_LATENCY.buckets[-1]
    nothing = scrapes((0.1,), ())
    assert nothing.quantile(f.INTER_TOKEN_LATENCY, 0.5) is None
    assert nothing.mean(f.INTER_TOKEN_LATENCY) is None
    assert nothing.quantile(f.TIME_TO_FIRST_TOKEN, 0.5) is None


def test_a_process_that_started_again_goes_on_from_nothing() -> None:
    later, before = scrapes((0.1,), (0.1,)).before, scrapes((0.1, 0.1), ()).now
    assert Stretch(before, later).grown(f.SLO_MISSED) == 1


def test_a_series_that_is_new_has_not_grown() -> None:
    """As a worker's under its new role, which has counted before."""
    now = scrapes((0.1,), ()).now
    assert Stretch(Scrape("", 0.0), now).grown(f.SLO_MISSED) == 0
