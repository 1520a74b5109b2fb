"""The benchmark of metrics on a tiny model."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.load.served_model import ServedModel
from benchmarks.metrics_cost import PROMPT, Plan, Turns, engine_settings, figures, load_engine, measure
from tandem.cost_model.step_work import StepWork
from tandem.engine.steps.batch import PendingStep, StepBatch
from tandem.protocol.ending import decode_pages, pages_for
from tandem.protocol.errors import InvalidArgument
from tandem.protocol.messages import Role
from tests.factories import write_tiny_model


def _tiny(folder: Path) -> ServedModel:
    return ServedModel(write_tiny_model(folder / "model"), "tiny", random_weights=False)


async def test_turns_with_and_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(requests=2, steps=3, turns=4)
    settings = replace(engine_settings(_tiny(tmp_path), "cpu", plan), threads=1)
    engine = load_engine(settings, "tiny", plan)
    launch, loop = engine.launch, asyncio.get_running_loop()

    def in_step(batch: StepBatch) -> PendingStep:
        """Waits for the event loop, so that the engine does not run ahead of it."""
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(60)
        return launch(batch)

    monkeypatch.setattr(engine, "launch", in_step)
    pairs = await measure(engine, settings, plan)
    assert len(pairs) == 2
    assert min(min(pair) for pair in pairs) > 0
    with pytest.raises(InvalidArgument, match="--turns: need answers of"):
        await measure(engine, settings, Plan(requests=2, steps=100, turns=40))


def test_a_turn_that_its_answers_do_not_last_for_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(requests=2, steps=3, turns=4)
    settings = replace(engine_settings(_tiny(tmp_path), "cpu", plan), threads=1)
    engine = load_engine(settings, "tiny", plan)
    monkeypatch.setattr(Plan, "answer", 12)
    with pytest.raises(RuntimeError, match="an answer ended before the last turn did"):
        asyncio.run(measure(engine, settings, plan))


def test_the_pool_holds_the_plan(tmp_path: Path) -> None:
    """The pool holds all answers besides the longest prompt that a worker keeps pages for, so no request is refused."""
    model = _tiny(tmp_path)
    for plan in (Plan(requests=2, steps=3, turns=4), Plan(requests=5, steps=20, turns=8)):
        engine = load_engine(replace(engine_settings(model, "cpu", plan), threads=1), "tiny", plan)
        pages, longest = engine.pool.counts().total, pages_for(engine.spec.max_context, engine.page_tokens)
        promised = decode_pages(Role.BOTH, pages, longest)
        needed = plan.requests * pages_for(PROMPT + plan.answer, engine.page_tokens)
        assert promised is not None
        assert needed <= promised <= needed + 1
    huge = Plan(requests=10**6, steps=3, turns=4)
    with pytest.raises(InvalidArgument, match=r"--requests: .* GiB of KV pages, for which cpu has too little memory"):
        load_engine(engine_settings(model, "cpu", huge), "tiny", huge)


def test_what_is_said_of_them() -> None:
    found = figures([(99.0, 100.0), (101.0, 100.0), (97.0, 100.0)])
    assert (found["tokens_per_s_on"], found["tokens_per_s_off"], found["ratio"]) == (99.0, 100.0, 0.99)
    assert 0.005 < found["ratio_standard_error"] < 0.02
    often = figures([(99.0, 100.0), (101.0, 100.0), (97.0, 100.0)] * 30)
    assert often["ratio_standard_error"] < found["ratio_standard_error"] / 2
    assert figures([(99.0, 100.0)] * 3)["ratio_standard_error"] == 0


async def test_a_turn_is_from_step_to_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps before a turn is requested, and after its end, do not count."""
    now = iter([100.0, 100.5, 101.5, 102.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    steps: list[StepWork] = []
    tested: Any = SimpleNamespace(
        _meter=SimpleNamespace(on_step=None),
        metrics=SimpleNamespace(step=lambda work, _seconds, _predicted_s: steps.append(work)),
        report=SimpleNamespace(load=lambda: SimpleNamespace(decode_requests=2)),
    )
    turns = Turns(tested, 2)
    running = asyncio.ensure_future(turns.run(3, on=True))
    await asyncio.sleep(0)
    for rows in (9, 4, 5, 6, 7):
        tested._meter.on_step(StepWork(decode_rows=rows), 0.1, 0.1)
    assert await running == (4 + 5 + 6) / 2.0
    assert len(steps) == 5
    off = asyncio.ensure_future(turns.run(3, on=False))
    await asyncio.sleep(0)
    assert tested._meter.on_step == turns._count
    off.cancel()
