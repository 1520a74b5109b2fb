"""Polls of writes in flight: none long before one can be over, frequent ones around that time, rarer ones when late."""

import ctypes
import sys
import threading
import time

import pytest

from kv_transfer.poll_backoff import FIRST_LOOK_S, LAST_LOOK_S, PollBackoff, wait_precisely

MIB = 1 << 20


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def looks(self, backoff: PollBackoff, seconds: float, moved: int = MIB) -> list[float]:
        """Returns the waits until a write that takes `seconds` is found to be over."""
        waits = []
        began = self.now
        while self.now - began < seconds:
            waits.append(backoff.wait_s(moved))
            self.now += waits[-1]
        backoff.ended(moved)
        return waits


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_without_experience_it_begins_closely_and_waits_longer_and_longer(clock: Clock) -> None:
    backoff = PollBackoff()
    backoff.began(0)
    waits = clock.looks(backoff, 10e-3)
    assert waits[:3] == pytest.approx([FIRST_LOOK_S] * 3)
    assert waits[2:] == sorted(waits[2:])
    assert waits[-1] == LAST_LOOK_S
    assert len(waits) < 50


def ended_after(backoff: PollBackoff, clock: Clock, seconds: float) -> None:
    """Ends the current write after `seconds`, just before it was polled."""
    clock.now += seconds
    backoff.wait_s(MIB)
    backoff.ended(MIB)


def test_it_looks_closely_when_a_write_may_be_over(clock: Clock) -> None:
    backoff = PollBackoff()
    backoff.began(0)
    ended_after(backoff, clock, 100e-6)

    backoff.began(0)
    assert backoff.wait_s(MIB) == pytest.approx(90e-6, rel=1e-3)
    assert backoff.wait_s(4 * MIB) == pytest.approx(360e-6, rel=1e-3)
    assert backoff.wait_s(1000 * MIB) == LAST_LOOK_S
    clock.now += 95e-6
    assert backoff.wait_s(MIB) == FIRST_LOOK_S
    clock.now += 145e-6
    assert backoff.wait_s(MIB) == FIRST_LOOK_S
    clock.now += 1e-3
    assert backoff.wait_s(MIB) == LAST_LOOK_S


@pytest.mark.parametrize("seconds", [43e-6, 340e-6, 686e-6, 5e-3])
def test_a_write_is_found_within_a_close_look_of_its_end_and_with_few_looks(clock: Clock, seconds: float) -> None:
    backoff = PollBackoff()
    backoff.began(0)
    ended_after(backoff, clock, seconds)
    for slower in (1.0, 1.1, 1.3):
        backoff.began(0)
        waits = clock.looks(backoff, slower * seconds)
        assert sum(waits) <= slower * seconds + FIRST_LOOK_S
        assert len(waits) <= 3 + 0.5 * seconds / FIRST_LOOK_S


def test_a_queue_is_expected_to_end_one_by_one(clock: Clock) -> None:
    backoff = PollBackoff()
    backoff.began(0)
    backoff.began(1)
    ended_after(backoff, clock, 200e-6)
    assert backoff.wait_s(MIB) == pytest.approx(180e-6, rel=1e-3)


def test_a_late_look_does_not_make_the_next_ones_late(clock: Clock) -> None:
    """Writes take 40 µs each, and the first was detected after 20 ms."""
    backoff = PollBackoff()
    backoff.began(0)
    clock.now += 20e-3
    backoff.ended(MIB)
    taken = 0.0
    for _ in range(12):
        backoff.began(0)
        taken = sum(clock.looks(backoff, 40e-6))
    assert taken < 100e-6


def test_waits_that_take_longer_than_asked_for_do_not_feed_on_themselves(clock: Clock) -> None:
    """A timer fires 70 µs late, and writes take 40 µs each."""
    backoff = PollBackoff()
    backoff.began(0)
    clock.now += 20e-3
    backoff.ended(MIB)
    taken = 0.0
    for _ in range(40):
        backoff.began(0)
        began = clock.now
        while clock.now - began < 40e-6:
            clock.now += backoff.wait_s(MIB) + 70e-6
        backoff.ended(MIB)
        taken = clock.now - began
    assert taken < 160e-6


def test_the_expectation_follows_a_wire_that_becomes_slower(clock: Clock) -> None:
    backoff = PollBackoff()
    for seconds in [100e-6] + [400e-6] * 100:
        backoff.began(0)
        ended_after(backoff, clock, seconds)
    backoff.began(0)
    assert backoff.wait_s(MIB) == pytest.approx(360e-6, rel=0.05)


@pytest.mark.skipif(sys.platform != "linux", reason="timers have a slack on Linux")
def test_a_thread_s_timers_ring_when_they_should() -> None:
    get_slack = 30  # PR_GET_TIMERSLACK
    slacks: list[int] = []

    def run() -> None:
        wait_precisely()
        slacks.append(ctypes.CDLL(None).prctl(get_slack, 0, 0, 0, 0))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert slacks == [1000]
