"""Looks at writes in flight: none long before one can be over, close ones then, rarer ones when it is late."""

import time

import pytest

from kv_transfer.pace import FIRST_LOOK_S, LAST_LOOK_S, Pace

MIB = 1 << 20


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_without_experience_it_begins_closely_and_doubles_its_waits(clock: Clock) -> None:
    pace = Pace()
    pace.began(0)
    waits = []
    for _ in range(8):
        waits.append(pace.wait_s(MIB))
        pace.in_vain()
    assert waits[:3] == [FIRST_LOOK_S, 2 * FIRST_LOOK_S, 4 * FIRST_LOOK_S]
    assert waits[-1] == LAST_LOOK_S


def test_it_looks_closely_after_half_of_what_the_writes_before_took(clock: Clock) -> None:
    pace = Pace()
    pace.began(0)
    clock.now += 100e-6
    pace.ended(MIB)

    pace.began(0)
    assert pace.wait_s(MIB) == pytest.approx(50e-6, rel=1e-3)
    assert pace.wait_s(4 * MIB) == pytest.approx(200e-6, rel=1e-3)
    assert pace.wait_s(1000 * MIB) == LAST_LOOK_S
    clock.now += 55e-6
    assert pace.wait_s(MIB) == FIRST_LOOK_S


def test_a_queue_is_expected_to_end_one_by_one(clock: Clock) -> None:
    pace = Pace()
    pace.began(0)
    pace.began(1)
    clock.now += 200e-6
    pace.ended(MIB)
    assert pace.wait_s(MIB) == pytest.approx(100e-6, rel=1e-3)


def test_a_late_look_does_not_make_the_next_ones_late(clock: Clock) -> None:
    """A wire of 40 µs a write, found out about after 20 ms the first time."""
    pace = Pace()
    pace.began(0)
    clock.now += 20e-3
    pace.ended(MIB)
    taken = 0.0
    for _ in range(12):
        pace.began(0)
        taken = 0.0
        while taken < 40e-6:
            wait = pace.wait_s(MIB)
            clock.now, taken = clock.now + wait, taken + wait
            pace.in_vain()
        pace.ended(MIB)
    assert taken < 100e-6


def test_the_expectation_follows_a_wire_that_becomes_slower(clock: Clock) -> None:
    pace = Pace()
    for seconds in [100e-6] + [400e-6] * 100:
        pace.began(0)
        clock.now += seconds
        pace.ended(MIB)
    pace.began(0)
    assert pace.wait_s(MIB) == pytest.approx(200e-6, rel=0.05)
