"""How old what is heard may be, and how long somebody has listened."""

import time

import pytest

from kv_transfer.listening import CATCH_UP_S, LOOK_GAP_S, OLD_S, Listening
from tests.unit.kv_transfer.test_nixl_reads import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "monotonic", made)
    return made


def look(here: Listening, clock: Clock, after_s: float, notes: int = 1) -> float:
    """How old the notes may be of a look so long after the last one, in seconds."""
    clock.now += after_s
    here.look(counts=True)
    return clock.now - here.found(notes)


def test_what_is_found_came_after_the_look_before(clock: Clock) -> None:
    here = Listening()
    assert [look(here, clock, 0.5), look(here, clock, OLD_S), look(here, clock, 0.25)] == [0.5, OLD_S, 0.25]


def test_after_a_pause_it_may_be_as_old_until_a_look_finds_nothing(clock: Clock) -> None:
    here = Listening()
    look(here, clock, 1.0)
    assert [look(here, clock, 8.0), look(here, clock, 6.0), look(here, clock, CATCH_UP_S)] == [8.0, 14.0, 14.5]
    assert look(here, clock, 0.25, notes=0) == 14.75
    assert look(here, clock, 0.25) == 0.25


def test_a_look_that_finds_nothing_right_after_a_pause_proves_nothing(clock: Clock) -> None:
    here = Listening()
    assert [look(here, clock, 8.0, notes=0), look(here, clock, 0.125)] == [8.0, 8.125]
    assert [look(here, clock, CATCH_UP_S, notes=0), look(here, clock, 0.125)] == [8.625, 0.125]


def test_only_close_looks_count_as_listening(clock: Clock) -> None:
    here = Listening()
    for after_s in (LOOK_GAP_S / 2, 2 * LOOK_GAP_S, LOOK_GAP_S / 2):
        look(here, clock, after_s)
    assert here.seconds == pytest.approx(LOOK_GAP_S)
    clock.now += LOOK_GAP_S / 2
    here.look(counts=False)
    assert here.seconds == pytest.approx(LOOK_GAP_S)
