"""The planner through a small day of changing load: it beats its initial split, and does not flap."""

from dataclasses import asdict
from statistics import fmean

import pytest

from benchmarks.planner.__main__ import hours
from benchmarks.planner.hours import Day
from benchmarks.planner.live_hours import LiveDay, parse_hour
from benchmarks.planner.oracles import judged, undone
from benchmarks.planner.run import PlannedRun, Run
from tandem.capacity.planner.decision import Split
from tandem.capacity.simulation.hardware import hardware
from tandem.cli.load.record import RequestRecord
from tandem.cli.load.report import make_report
from tandem.cli.load.slo import SloCell
from tandem.protocol.errors import InvalidArgument
from tandem.settings.slo import SloClass

WORKERS, HOUR_S = 4, 50.0
SLO = SloClass("planned", ttft_s=3.0, itl_s=0.03, itl_percent=95.0)


def test_a_day_that_swings() -> None:
    machine = hardware("qwen3-32b", None, 50.0, 1.0)
    day, half = Day(hours(WORKERS, 2), HOUR_S, SLO), Split(2, 2)
    stays = Run(machine, day, half, "decode-priority").go()
    planned = PlannedRun(machine, day, half, "decode-priority", window_s=5.0)
    tally = planned.go()
    assert tally.due == stays.due
    assert sum(tally.met) > 1.1 * sum(stays.met)
    assert list(dict.fromkeys(change.direction for change in planned.changes)) == ["to_prefill", "to_decode"]
    assert undone([asdict(each) for each in planned.changes], HOUR_S) == 0
    assert all("%" in each.reason for each in planned.decisions)


def test_oracles_are_the_best_of_what_was_simulated() -> None:
    by_split = {"3:1": {"a": 10.0, "b": 1.0}, "2:2": {"a": 6.0, "b": 6.0}, "1:3": {"a": 1.0, "b": 10.0}}
    changes = [{"at_s": at, "direction": way, "flips": 2} for at, way in ((10, "to_prefill"), (110, "to_decode"))]
    planned = {"goodput_per_s": [9.5, 9.6], "changes": changes}
    found = judged(planned, by_split, ["a", "b"], 100.0)
    assert found["best_splits"] == {"a": "3:1", "b": "1:3"}
    assert found["single_split"] == "2:2"
    assert found["of_the_best_of_each_hour"] == 0.955
    assert found["over_the_best_single"] == 1.5917
    assert (found["flips"], found["undone_flips"], found["kept"]) == (4, 0, True)
    back_and_forth = planned | {"changes": [*changes, {"at_s": 20, "direction": "to_decode", "flips": 2}]}
    found = judged(back_and_forth, by_split, ["a", "b"], 100.0)
    assert (found["flips"], found["undone_flips"], found["kept"]) == (6, 2, False)


def test_a_day_for_a_real_cluster() -> None:
    """The hours follow each other, and prompts of two hours share no prefix."""
    kinds = [parse_hour("many:20:100:5"), parse_hour("few:5:10:50")]
    day = LiveDay([*kinds, *kinds], 10.0, seed=3).workload
    assert list(day.arrivals) == sorted(day.arrivals, key=lambda arrival: arrival.due_s)
    hours = [[each for each in day.arrivals if number * 10 <= each.due_s < number * 10 + 10] for number in range(4)]
    assert [len(hour) for hour in hours] == pytest.approx([200, 50, 200, 50], rel=0.3)
    assert len({block.key for each in day.arrivals for block in each.prompt}) == len(day.arrivals)
    assert fmean(each.prompt_tokens for each in hours[0]) == pytest.approx(100, rel=0.2)
    assert fmean(each.new_tokens for each in hours[3]) == pytest.approx(50, rel=0.2)


def test_goodput_of_the_hours_of_a_day() -> None:
    """Requests count in the hour in which they were due, whenever they ended."""
    cell = SloCell("planned", ttft_s=1.0, gap_s=1.0)
    day = LiveDay([parse_hour("a:1:10:5")] * 2, 10.0)
    records = [
        RequestRecord(number, due_s, due_s, due_s + 30, (due_s + wait_s,), 1)
        for number, (due_s, wait_s) in enumerate(((0.0, 0.5), (9.9, 0.9), (9.9, 1.1), (10.0, 0.5), (20.1, 1.5)))
    ]
    assert day.met(make_report(day.workload, records, [cell], 0.01), cell) == ([2, 1], [3, 2])


@pytest.mark.parametrize("text", ["a:1:10", "a:0:10:5", "a:1:0:5", "a:1:x:5", "a:1:10:0.5"])
def test_hours_that_are_none(text: str) -> None:
    with pytest.raises(InvalidArgument, match="--hour"):
        parse_hour(text)


def test_flips_that_others_of_the_same_hour_undo_are_counted() -> None:
    made = ((5, "to_prefill", 6), (55, "to_decode", 9), (80, "to_prefill", 2))
    changes = [{"at_s": at, "direction": way, "flips": flips} for at, way, flips in made]
    assert undone(changes, 50.0) == 2
    assert undone(changes[:2], 50.0) == 0
