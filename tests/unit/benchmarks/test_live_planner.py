"""A day for workers of unknown speed: the measured pace, the sizes, and the schedule."""

from statistics import fmean

import pytest

from benchmarks.planner.live_hours import LiveDay, parse_hour
from benchmarks.planner.pace import answer_lengths, answer_rate, burst, handover_gap, prompt_rate
from benchmarks.planner.rehearsal import Rehearsal
from benchmarks.planner.sizes import ITL_HANDOVERS, ITL_STEPS, LOAD, Pace, size
from benchmarks.planner.timetable import END_S, HOUR_MAX_S, HOUR_MIN_S, Timetable
from tandem.capacity.planner.decision import Split
from tandem.cli.load.record import RequestRecord
from tandem.protocol.errors import FailedPrecondition, InvalidArgument

FAST = Pace(3, prompt_tokens_per_s=2000.0, answer_tokens_per_s=530.0, step_s=0.03, handover_s=0.05)
SLOW = Pace(3, prompt_tokens_per_s=400.0, answer_tokens_per_s=180.0, step_s=0.08, handover_s=0.3)


@pytest.mark.parametrize("pace", [FAST, SLOW])
def test_the_right_split_is_loaded_and_the_wrong_one_is_not_enough(pace: Pace) -> None:
    sizes = size(pace)
    prefill, decode = sizes.kinds
    prompts = prefill.rate * prefill.source.prompt.mean / pace.prompt_tokens_per_s
    answers = decode.rate * decode.source.answer.mean / pace.answer_tokens_per_s
    assert prompts == pytest.approx(LOAD, rel=0.02)
    assert answers == pytest.approx(LOAD, rel=0.02)
    # The other role has one worker in the right split.
    assert prefill.rate * prefill.source.answer.mean / pace.answer_tokens_per_s * 2 < 0.6
    assert decode.rate * decode.source.prompt.mean / pace.prompt_tokens_per_s * 2 < 0.6


def test_promises_are_kept_by_such_steps_and_no_looser_than_that() -> None:
    fast, slow = size(FAST), size(SLOW)
    assert fast.slo.ttft_s < slow.slo.ttft_s
    assert slow.slo.itl_s >= max(ITL_STEPS * SLOW.step_s, ITL_HANDOVERS * SLOW.handover_s)
    assert slow.window_s > fast.window_s == 1.0
    # A prompt of the mean length takes the same part of the target, however fast workers are.
    for pace, sizes in ((FAST, fast), (SLOW, slow)):
        alone_s = sizes.prefill_heavy.source.prompt.mean / (pace.prompt_tokens_per_s / 2)
        assert alone_s == pytest.approx(sizes.slo.ttft_s / 6, rel=0.02)


def test_workers_that_are_too_slow_for_any_promise() -> None:
    with pytest.raises(FailedPrecondition, match="more cores"):
        size(Pace(3, 400.0, 180.0, step_s=0.08, handover_s=3.0))


def test_the_sized_day_under_the_virtual_clock() -> None:
    """The sized day under the virtual clock, with workers as fast as measured, meets the bounds of the real one."""
    rehearsal = Rehearsal.of(FAST, size(FAST), batch=8, step_tokens=256, seed=0)
    found = rehearsal.go([Split(2, 1), Split(1, 2)], 2, 25.0, 20.0)
    assert found["best_splits"] == {"prefill-heavy": "2:1", "decode-heavy": "1:2"}
    assert all(0.3 < found["static_share"][split][kind] < 0.65 for split, kind in WRONG)
    assert found["of_the_best_of_each_hour"] >= 0.95
    assert found["over_the_best_single"] >= 1.2
    assert (found["flips"], found["undone_flips"]) == (2, 0)


WRONG = (("1:2", "prefill-heavy"), ("2:1", "decode-heavy"))


def _record(number: int, *token_s: float) -> RequestRecord:
    return RequestRecord(number, 0.0, 0.0, token_s[-1], token_s, len(token_s))


def test_rates_are_those_of_busy_workers() -> None:
    """Two workers take 0.5 s per prompt; the last two prompts run alone and do not count."""
    firsts = [0.5 * (1 + number // 2) for number in range(10)] + [3.5, 4.5]
    records = [_record(number, first, first + 0.1) for number, first in enumerate(firsts)]
    assert prompt_rate(records, 100) == pytest.approx(400.0)
    assert handover_gap(records) == pytest.approx(0.1)


def test_a_start_that_is_slow_does_not_count() -> None:
    firsts = [3.0 + 0.5 * (1 + number // 2) for number in range(12)]
    records = [_record(number, first, first + 0.1) for number, first in enumerate(firsts)]
    assert prompt_rate(records, 100) == pytest.approx(400.0)


def test_bursts_differ_and_their_answers_end_one_by_one() -> None:
    lengths = answer_lengths(48)
    assert sorted(lengths) == [*range(24, 72)]
    assert fmean(lengths[:16]) == pytest.approx(48, rel=0.1)
    bursts = [burst(24, [5, 6]), burst(24, [5, 6], 1), burst(25, [5, 6])]
    assert len({each.seed for each in bursts}) == 3
    assert [arrival.new_tokens for arrival in bursts[0].arrivals] == [5, 6]


def test_answers_count_in_the_middle() -> None:
    """One more row each second up to four, then one less: in the middle four tokens per step of 0.1 s."""
    records = [
        _record(number, *(begin + 0.1 * step for step in range(101))) for number, begin in enumerate((0, 1, 2, 3))
    ]
    assert answer_rate(records) == pytest.approx(40.0, rel=0.02)


def test_hours_fill_what_time_is_left() -> None:
    table = Timetable(330.0, 100.0, clock=lambda: 140.0)
    static_s = table.static_seconds(4, 4, start_s=20.0, overhead_s=6.0)
    assert 4 * static_s + 4 * 1.5 * static_s + 20.0 + 5 * 6.0 + END_S == pytest.approx(330.0 - 40.0, abs=0.5)
    later = Timetable(330.0, 0.0, clock=lambda: 170.0)
    assert 4 * later.hour_seconds(4, 6.0) + 6.0 + END_S == pytest.approx(160.0, abs=0.5)
    assert Timetable(9000.0, 0.0, clock=lambda: 0.0).hour_seconds(4, 6.0) == HOUR_MAX_S
    assert Timetable(330.0, 0.0, clock=lambda: 320.0).hour_seconds(4, 6.0) == HOUR_MIN_S
    with pytest.raises(InvalidArgument, match="--seconds"):
        Timetable(330.0, 0.0, clock=lambda: 230.0).static_seconds(4, 4, start_s=20.0, overhead_s=6.0)


def test_requests_before_the_first_hour_are_of_none() -> None:
    kinds = [parse_hour("many:20:100:5"), parse_hour("few:5:10:50")]
    day = LiveDay([*kinds, *kinds], 10.0, seed=3, warmup_s=6.0)
    arrivals = day.workload.arrivals
    assert list(arrivals) == sorted(arrivals, key=lambda arrival: arrival.due_s)
    assert day.end_s == 46.0
    assert fmean(each.new_tokens for each in arrivals if each.due_s < 6.0) > 20
    assert [day.hour_of(due_s) for due_s in (0.0, 5.9, 6.0, 16.1, 45.9)] == [None, None, 0, 1, 3]
    counted = [each for each in arrivals if each.due_s >= 6.0]
    per_s = day.due_per_s()
    assert 20.0 * (per_s["many"] + per_s["few"]) == pytest.approx(len(counted))
