"""The samples of the cost model: the duration and the work of each step."""

import pytest

from tandem.capacity.simulation.clock import VirtualClock
from tandem.cost_model.step_work import StepWork
from tandem.engine.steps.batch import StepRow, TokenRows
from tandem.protocol.cost_parameters import UNMEASURED
from tandem.worker.loop import StepMeter
from tandem.worker.scheduler import step_work
from tests.factories import draw

WORK = StepWork(decode_rows=1, decode_context_tokens=1)


class Seen:
    """In the place of the fit."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def observe(self, _: StepWork, seconds: float) -> None:
        self.seconds.append(seconds)


def play(marks: list[tuple[float, float]]) -> list[float]:
    """Steps that were launched and ended at these times, in the order of their ends → what each is said to take."""
    clock, seen = VirtualClock(100.0), Seen()
    meter = StepMeter(UNMEASURED, clock)
    meter._fit = seen  # type: ignore[assignment]
    for launched, ended in marks:
        clock.now = launched
        began = meter.begin()
        clock.now = ended
        meter.end(WORK, began)
        meter.learn()
    return seen.seconds


def test_steps_one_after_the_other_begin_with_their_schedule() -> None:
    assert play([(1, 3), (4, 9)]) == pytest.approx([2, 5])


def test_a_step_that_was_launched_ahead_begins_with_the_end_of_the_one_before() -> None:
    assert play([(1, 3), (2, 7), (5, 8)]) == pytest.approx([2, 4, 1])


def test_an_idle_time_is_no_step() -> None:
    assert play([(1, 3), (1003, 1005)]) == pytest.approx([2, 2])


def test_nothing_is_learned_from_steps_that_score_prompts() -> None:
    clock, seen = VirtualClock(100.0), Seen()
    meter = StepMeter(UNMEASURED, clock)
    meter._fit = seen  # type: ignore[assignment]
    for ended, scored in ((102.0, True), (105.0, False)):
        clock.now = ended
        meter.end(WORK, 100.0, scored=scored)
    meter.learn()
    assert seen.seconds == [3.0], "it begins where the one before has ended"


def test_what_is_in_a_step() -> None:
    decoding = TokenRows.of([StepRow((5,), 10, (), draw()), StepRow((5,), 0, (), draw())])
    assert step_work(decoding) == StepWork(decode_rows=2, decode_context_tokens=12)
    chunks = [StepRow((5, 6), 0, (), None), StepRow((5,), 7, (), None)]
    assert step_work(decoding, chunks) == StepWork(3, 1 + 2 + 8, 2, 12)


def test_predictions_follow_what_was_measured() -> None:
    clock = VirtualClock(100.0)
    meter = StepMeter(UNMEASURED, clock)
    for _ in range(50):
        began = meter.begin()
        clock.now += 0.003
        meter.end(WORK, began)
        meter.learn()
        clock.now += 1.0
    assert meter.cost().seconds(WORK) == pytest.approx(0.003, rel=0.05)
    assert meter.parameters.observed == 50
