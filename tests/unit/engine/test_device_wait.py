"""Polling ends with the event, or after a while."""

import time

import pytest

from tandem.engine import device_wait


class Event:
    """An event that has happened at the `looks`-th poll."""

    def __init__(self, looks: float) -> None:
        self.looks = looks
        self.slept = False

    def query(self) -> bool:
        self.looks -= 1
        return self.looks <= 0

    def synchronize(self) -> None:
        self.slept = True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Returns the duration of each sleep; time passes only by sleeping."""
    sleeps: list[float] = []
    monkeypatch.setattr(time, "monotonic", lambda: sum(sleeps))
    monkeypatch.setattr(time, "sleep", sleeps.append)
    return sleeps


@pytest.mark.parametrize("looks", [1, 2, 9])
def test_what_happens_soon_is_looked_for(clock: list[float], looks: int) -> None:
    event = Event(looks)
    device_wait.wait_for(event)
    assert len(clock) == looks - 1
    assert not event.slept


def test_what_takes_long_is_waited_for_asleep(clock: list[float]) -> None:
    event = Event(float("inf"))
    device_wait.wait_for(event)
    assert event.slept
    assert sum(clock) == pytest.approx(device_wait.SPIN_S, abs=device_wait.LOOK_S)
