"""Tests of the margin between predicted decode steps and gaps at clients, learned where no prompt is computed."""

import pytest

from router.placement.worker_state import AnswerWork, PromptWork, WorkerState
from tandem.protocol.messages import Role
from tandem.settings.slo import SloClass
from tests.unit.router.fleets import TestFleet

P99 = SloClass("p99", itl_s=0.01)


@pytest.fixture
def worker() -> WorkerState:
    worker = TestFleet().add("w", Role.BOTH)
    worker.add_answer("answer", AnswerWork(4, 500, P99))
    return worker


def test_gaps_beside_prompts_teach_nothing(worker: WorkerState) -> None:
    clock, long_s, target_s = worker.clock, 3 * worker.step_s, worker.step_target(P99)
    worker.add_prompt("prompt", PromptWork(1000))
    worker.observe_gap(long_s)
    assert worker.step_target(P99) == target_s
    worker.prompt_computed("prompt")
    worker.observe_gap(long_s)
    assert worker.step_target(P99) == target_s, "the gap began while the prompt was computed"
    clock.now += 2 * long_s  # type: ignore[attr-defined]
    worker.observe_gap(long_s)
    assert worker.step_target(P99) < target_s


def test_decode_steps_are_planned_shorter_by_the_margin(worker: WorkerState) -> None:
    assert worker.step_target(P99) == pytest.approx(P99.itl_s / worker.cost.margin)
    worker.observe_gap(3 * worker.step_s)
    assert worker.margin > worker.cost.margin
    assert worker.step_target(P99) == pytest.approx(P99.itl_s / worker.margin)
