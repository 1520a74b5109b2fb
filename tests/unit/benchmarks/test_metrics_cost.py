"""The benchmark of counting, on a tiny model."""

import asyncio
from pathlib import Path

import pytest

from benchmarks.metrics_cost import Plan, figures, measure
from engine.config import EngineConfig
from engine.model_runner import ModelRunner
from tests.factories import write_tiny_model
from wire.errors import InvalidArgument


def test_turns_with_and_without(tmp_path: Path) -> None:
    settings = EngineConfig(
        write_tiny_model(tmp_path / "model"), max_batch_requests=2, kv_cache_bytes=1 << 22, threads=1
    )
    engine = ModelRunner.load(settings)
    pairs = asyncio.run(measure(engine, settings, Plan(requests=2, steps=3, turns=4)))
    assert len(pairs) == 2
    assert min(min(pair) for pair in pairs) > 0
    with pytest.raises(InvalidArgument, match="--turns: need answers of"):
        asyncio.run(measure(engine, settings, Plan(requests=2, steps=100, turns=40)))


def test_what_is_said_of_them() -> None:
    found = figures([(99.0, 100.0), (101.0, 100.0), (97.0, 100.0)])
    assert (found["tokens_per_s_on"], found["tokens_per_s_off"], found["ratio"]) == (99.0, 100.0, 0.99)
    assert found["ratio_standard_error"] == pytest.approx(0.0115, abs=1e-4)
