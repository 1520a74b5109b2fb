"""The simulations of retention and of sessions: what they compare, in seconds instead of minutes."""

import argparse

import pytest

from benchmarks.router import retention, sessions
from tandem.capacity.simulation.hardware import hardware


def options_of(case: object, *given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    case.add_options(parser)  # type: ignore[attr-defined]
    return parser.parse_args(given)


def test_what_is_kept_is_what_is_read_again() -> None:
    options = options_of(retention, "--pages", "1500", "--seconds", "200", "--agents", "0.05", "--gap-s", "10")
    agents = {name: retention.simulate(name, options)["agents"] for name in retention.POLICIES}
    assert agents["hints"] > agents["no retention"] + 0.05
    assert agents["estimate"] > agents["no retention"]
    assert agents["greedy tenant"] > agents["no shares"] + 0.1
    assert retention.simulate("hints", options)["agents"] == agents["hints"], "a run can be repeated"


@pytest.mark.parametrize("name", sessions.POLICIES)
def test_sessions_are_served_whatever_places_them(name: str) -> None:
    options = options_of(sessions, "--workers", "2", "--sessions", "6", "--seconds", "20", "--pause-s", "1")
    row = sessions.simulate(name, hardware(sessions.SHAPE, None, 20.0, 1.0), options)
    assert row["failed"] == 0
    assert row["turns_s"] > 1
    assert 0 <= row["cached_share"] < 1
    assert 1 <= row["busiest_over_mean"] <= 2
