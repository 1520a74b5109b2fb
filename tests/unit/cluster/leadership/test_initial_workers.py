"""The initial workers of a controller: those that live, and those that are missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.operations.initial_workers import InitialWorkers, inherit
from tandem.cluster.supervision.roles import plan
from tandem.cluster.supervision.takeover import Takeover
from tandem.protocol.messages import Role
from tandem.settings.cluster import ClusterSettings
from tandem.settings.planner import Limits, PlannerMode, PlannerSettings, Range

P, D, BOTH = Role.PREFILL, Role.DECODE, Role.BOTH


def of(living: dict[str, Role], takeover: Takeover | None = None, **settings: Any) -> InitialWorkers:
    config = ClusterSettings.of(model=Path("m"), ray_address="auto", **settings)
    return inherit(config, plan(config, 0), living, takeover)


def names(state: InitialWorkers) -> list[str]:
    return [slot.worker_id for slot in state.slots]


def test_without_live_workers_the_state_is_that_of_the_config() -> None:
    state = of({}, prefill=1, decode=2)
    assert names(state) == ["prefill-0", "decode-0", "decode-1"]
    assert state.roles == {"prefill-0": P, "decode-0": D, "decode-1": D}
    assert (state.topology.prefill, state.surplus) == (1, False)


@pytest.mark.parametrize(
    ("living", "settings", "expected", "surplus"),
    [
        ({"decode-0": D}, {}, ["decode-0", "prefill-0"], False),
        ({"decode-1": D, "prefill-0": P}, {}, ["decode-1", "prefill-0"], False),
        ({"decode-1": D}, {"decode": 2}, ["decode-1", "prefill-0", "decode-0"], False),
        ({"prefill-0": P, "decode-0": D, "decode-7": D}, {}, ["prefill-0", "decode-0", "decode-7"], True),
        ({"both-0": BOTH, "both-1": BOTH}, {}, ["both-0", "both-1"], False),
        ({"prefill-0": P, "decode-0": D}, {"mode": "colocated", "workers": 2}, ["prefill-0", "decode-0"], False),
    ],
)
def test_live_workers_stay_and_the_rest_is_filled(
    living: dict[str, Role], settings: dict[str, Any], expected: list[str], surplus: bool
) -> None:
    state = of(living, **settings)
    assert names(state) == expected
    assert state.surplus is surplus


def test_what_they_do_now_counts_and_a_part_is_left_for_each() -> None:
    state = of({"prefill-0": D, "decode-0": P})
    assert state.roles == {"prefill-0": D, "decode-0": P}
    assert of({"prefill-0": P, "decode-0": D, "decode-1": D}, prefill=5).topology.prefill == 5
    assert of({"prefill-0": P}, Takeover(("decode-0",)), prefill=1).topology.prefill == 1


def test_who_is_away_stays_away_and_counts() -> None:
    state = of({"prefill-0": P}, Takeover(("decode-0",), (("decode-1", "10.0.0.1"),)), decode=2)
    assert names(state) == ["prefill-0", "decode-0", "decode-1"]
    assert state.drained == ("decode-0", "decode-1")
    assert of({"prefill-0": P, "decode-0": D}, Takeover(("decode-0",))).drained == ()


def test_the_planner_keeps_its_number_and_split() -> None:
    living = {"prefill-0": P, "prefill-1": P, "decode-0": P, "decode-1": D}
    planner = PlannerSettings(PlannerMode.ON, limits=Limits(workers=Range(2, 8)))
    state = of(living, prefill=1, decode=1, planner=planner)
    assert (names(state), state.topology.prefill, state.surplus) == (list(living), 3, False)
    fewest = PlannerSettings(PlannerMode.ON, limits=Limits(workers=Range(5, 8)))
    assert len(of(living, prefill=1, decode=9, planner=fewest).slots) == 5
    most = PlannerSettings(PlannerMode.ON, limits=Limits(workers=Range(2, 3)))
    assert of(living, planner=most).surplus
