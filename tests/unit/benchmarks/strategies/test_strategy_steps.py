"""Statistics of a load's steps, from its workers' metrics."""

import pytest

from benchmarks.strategies.parts import joined
from benchmarks.strategies.switch import steps_of
from tandem.metrics import families as f
from tandem.metrics.exposition import Exposition
from tandem.metrics.registry import Registry
from tandem.metrics.scrape import Scrape, ScrapeInterval


def test_steps_of_a_load_are_those_since_it_began() -> None:
    registry = Registry({"worker": "w"})
    seconds, over = (registry.histogram(family, "mixed") for family in (f.STEP_SECONDS, f.STEP_OVER_PREDICTED))
    seconds.observe(1.0)
    over.observe(3.0)
    before = Scrape(Exposition(registry).render()[0].decode(), 0.0)
    for _ in range(98):
        seconds.observe(0.0045)
        over.observe(0.97)
    for _ in range(2):
        seconds.observe(0.18)
        over.observe(1.39)
    by_class = steps_of(ScrapeInterval(before, Scrape(Exposition(registry).render()[0].decode(), 1.0)))
    assert list(by_class) == ["mixed"]
    steps = by_class["mixed"]
    assert steps["count"] == 100
    assert 4.0 <= steps["ms"]["p50"] <= 5.0  # type: ignore[index]
    assert 100.0 < steps["ms"]["p99"] <= 200.0  # type: ignore[index]
    assert steps["over_predicted"]["p99"] == pytest.approx(1.35, abs=0.05)  # type: ignore[index]


def test_each_class_keeps_how_its_steps_went() -> None:
    loads = {
        name: {"goodput": {name: 1}, "ttft_ms": 1, "gap_ms": 1, "tokens_per_s": 1, "errors": {}, "served_by": {}}
        for name in ("strict", "balanced", "quick")
    }
    assert "steps" not in joined(loads)["asked"]["strict"], "a virtual clock has none"
    for name, load in loads.items():
        load["steps"] = {"mixed": {"count": len(name)}}
    assert joined(loads)["asked"]["quick"]["steps"] == {"mixed": {"count": 5}}
