"""What is learned of gaps beside predicted steps: the quantile that a class is judged by, of decoding alone."""

import random

import pytest

from costs.chunks import GAP_NOISE
from router.gap_noise import MOST, GapNoise
from router.placed_work import AnswerWork, PromptWork
from router.slo import SloClass
from router.worker_books import WorkerBooks
from tests.unit.router.fleets import TestFleet
from wire.messages import Role

P99 = SloClass("p99", itl_s=0.01)
P95 = SloClass("p95", itl_s=0.01, itl_percent=95.0)
STEP_S = 0.005


def ratios(spread: float, seed: int = 3) -> list[float]:
    dice = random.Random(seed)
    return [dice.lognormvariate(0.0, spread) for _ in range(60_000)]


@pytest.mark.parametrize(("slo", "share"), [(P99, 0.005), (P95, 0.025)])
@pytest.mark.parametrize("spread", [0.03, 0.1])
def test_half_of_the_gaps_that_may_be_longer_are(slo: SloClass, share: float, spread: float) -> None:
    noise, over, seen = GapNoise(), 0, ratios(spread)
    for number, ratio in enumerate(seen):
        over += number >= len(seen) // 2 and ratio > noise.of(slo)
        noise.note(slo, ratio * STEP_S, STEP_S, 1, float(number))
    assert over / (len(seen) / 2) == pytest.approx(share, rel=0.25)


def test_all_rows_of_a_step_count_as_one() -> None:
    """As soon learned beside forty answers as by one."""
    alone, many = GapNoise(), GapNoise()
    for number, ratio in enumerate(ratios(0.1)[:3000]):
        alone.note(P99, ratio * STEP_S, STEP_S, 1, float(number))
        for _ in range(40):
            many.note(P99, ratio * STEP_S, STEP_S, 40, float(number))
    assert many.of(P99) == pytest.approx(alone.of(P99), rel=0.02)
    assert alone.of(P99) != GAP_NOISE


def test_a_standstill_is_one_long_gap_and_there_is_an_end() -> None:
    noise = GapNoise()
    noise.note(P99, 1000 * STEP_S, STEP_S, 1, 10.0)
    assert GAP_NOISE < noise.of(P99) <= GAP_NOISE + 0.02
    assert noise.of(P95) == GAP_NOISE, "each class has its own"
    for number in range(1000):
        noise.note(P99, 2 * STEP_S, STEP_S, 1, float(number))
    assert noise.of(P99) == MOST
    for number in range(100_000):
        noise.note(P99, 0.5 * STEP_S, STEP_S, 1, float(number))
    assert noise.of(P99) == 1.0


@pytest.fixture
def worker() -> WorkerBooks:
    fleet = TestFleet()
    worker = fleet.add("w", Role.BOTH)
    worker.book_decode("answer", AnswerWork(4, 500, P99))
    return worker


def test_gaps_beside_prompts_say_nothing(worker: WorkerBooks) -> None:
    clock, long_s = worker.clock, 3 * worker.step_s
    worker.book_prefill("prompt", PromptWork(1000))
    worker.note_gap(P99, long_s)
    assert worker.noise.of(P99) == GAP_NOISE
    worker.prompt_computed("prompt")
    worker.note_gap(P99, long_s)
    assert worker.noise.of(P99) == GAP_NOISE, "it began while the prompt was computed"
    clock.now += 2 * long_s  # type: ignore[attr-defined]
    worker.note_gap(P99, long_s)
    assert worker.noise.of(P99) > GAP_NOISE


def test_who_is_promised_nothing_teaches_nothing(worker: WorkerBooks) -> None:
    worker.note_gap(SloClass("first", ttft_s=1.0), 3 * worker.step_s)
    assert not worker.noise._factors


def test_steps_are_kept_as_much_shorter_as_gaps_are_longer(worker: WorkerBooks) -> None:
    assert worker.step_target(P99) == pytest.approx(P99.itl_s / GAP_NOISE)
    worker.note_gap(P99, 3 * worker.step_s)
    assert worker.step_target(P99) == pytest.approx(P99.itl_s / worker.noise.of(P99))
    rare = SloClass("rare", itl_s=0.01, worst_gap_s=0.006, itl_percent=95.0)
    assert rare.step_target(0.1, 1.05) == pytest.approx(0.006 / GAP_NOISE), "of every gap more is to be feared"
    assert rare.step_target(0.1, 1.4) == pytest.approx(0.006 / 1.4)
