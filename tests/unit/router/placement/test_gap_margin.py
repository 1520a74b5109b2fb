"""The margin between predicted steps and gaps at clients: a quantile, learned where nothing but decoding happens."""

import random

import pytest

from router.placement.gap_margin import GapMargin
from router.placement.worker_state import AnswerWork, PromptWork, WorkerState
from router.slo import SloClass
from tests.unit.router.fleets import TestFleet
from wire.messages import Role

P99 = SloClass("p99", itl_s=0.01)
STEP_S = 0.005
PRIOR = 1.2
MOST = 1.5


def ratios(spread: float, seed: int = 3) -> list[float]:
    dice = random.Random(seed)
    return [dice.lognormvariate(0.0, spread) for _ in range(60_000)]


@pytest.mark.parametrize("spread", [0.03, 0.1])
def test_one_in_two_hundred_gaps_is_longer(spread: float) -> None:
    margin, over, seen = GapMargin(), 0, ratios(spread)
    for number, ratio in enumerate(seen):
        over += number >= len(seen) // 2 and ratio > margin.of(PRIOR)
        margin.observe(ratio * STEP_S, STEP_S, 1, PRIOR, float(number))
    assert over / (len(seen) / 2) == pytest.approx(0.005, rel=0.25)


def test_all_rows_of_a_step_count_as_one() -> None:
    """As soon learned beside forty answers as by one."""
    alone, many = GapMargin(), GapMargin()
    for number, ratio in enumerate(ratios(0.1)[:3000]):
        alone.observe(ratio * STEP_S, STEP_S, 1, PRIOR, float(number))
        for _ in range(40):
            many.observe(ratio * STEP_S, STEP_S, 40, PRIOR, float(number))
    assert many.of(PRIOR) == pytest.approx(alone.of(PRIOR), rel=0.02)
    assert alone.of(PRIOR) != PRIOR


def test_a_stall_is_one_long_gap_and_the_margin_is_bounded() -> None:
    margin = GapMargin()
    margin.observe(1000 * STEP_S, STEP_S, 1, PRIOR, 10.0)
    assert PRIOR < margin.of(PRIOR) <= PRIOR + 0.02
    for number in range(1000):
        margin.observe(2 * STEP_S, STEP_S, 1, PRIOR, float(number))
    assert margin.of(PRIOR) == MOST
    for number in range(100_000):
        margin.observe(0.5 * STEP_S, STEP_S, 1, PRIOR, float(number))
    assert margin.of(PRIOR) == 1.0


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


def test_steps_are_planned_as_much_shorter_as_gaps_are_longer(worker: WorkerState) -> None:
    assert worker.step_target(P99) == pytest.approx(P99.itl_s / worker.cost.margin)
    worker.observe_gap(3 * worker.step_s)
    assert worker.step_target(P99) == pytest.approx(P99.itl_s / worker.gap_margin.of(worker.cost.margin))
