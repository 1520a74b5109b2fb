"""The planner through a small day of changing load: it beats its initial split, and does not flap."""

from collections import Counter, defaultdict
from collections.abc import Sequence

from tandem.capacity.planner.decision import Direction, Split
from tandem.capacity.simulation.arrivals import Mix
from tandem.capacity.simulation.hardware import hardware
from tandem.settings.slo import SloClass
from tests.unit.capacity.planner.planned_day import Change, Day, Hour, PlannedRun, Run

WORKERS, HOUR_S = 4, 36.0
SLO = SloClass("planned", ttft_s=3.0, itl_s=0.03, itl_percent=95.0)
HOURS = (
    Hour("prefill-heavy", Mix(3.8 * WORKERS, 1500, 50, 0.5)),
    Hour("decode-heavy", Mix(3.6 * WORKERS, 200, 1000, 0.5)),
)
"""Requests per second at about four fifths of the best split's goodput in both kinds of hours."""


def undone(changes: Sequence[Change]) -> int:
    """Returns the number of role changes that others of the same hour undo."""
    by_hour: dict[int, Counter[str]] = defaultdict(Counter)
    for change in changes:
        by_hour[int(change.at_s / HOUR_S)][change.direction] += change.flips
    return sum(min(flips[Direction.TO_PREFILL], flips[Direction.TO_DECODE]) for flips in by_hour.values())


def test_a_day_that_swings() -> None:
    machine = hardware("qwen3-32b", None, 50.0, 1.0)
    day, half = Day(HOURS, HOUR_S, SLO), Split(2, 2)
    stays = Run(machine, day, half, "decode-priority").go()
    planned = PlannedRun(machine, day, half, "decode-priority", window_s=5.0)
    tally = planned.go()
    assert tally.due == stays.due
    assert sum(tally.met) > 1.1 * sum(stays.met)
    assert list(dict.fromkeys(change.direction for change in planned.changes)) == ["to_prefill", "to_decode"]
    assert undone(planned.changes) == 0
    assert all("%" in decision.reason for decision in planned.decisions)
