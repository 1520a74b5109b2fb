"""A client process sends its requests when they are due, and ends the load if it dies."""

import asyncio
from multiprocessing import Pipe

import pytest

from tandem.cli.load.client import until
from tandem.cli.load.run import _receive
from tandem.protocol.errors import Internal

LATE_S = 0.013
"""Extra seconds that a host adds to a sleep long enough for the processor to idle."""
RESTS_AFTER_S = 0.02


class Host:
    """A clock that sleeps advance, long ones too far."""

    def __init__(self) -> None:
        self.now = 100.0
        self.sleeps = 0

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        assert seconds >= 0.0
        self.sleeps += 1
        self.now += seconds + (LATE_S if seconds > RESTS_AFTER_S else 0.0)


@pytest.mark.parametrize("wait_s", [0.0005, 0.01, 0.03, 0.2, 2.4, 60.0])
def test_who_slept_for_long_is_still_on_time(wait_s: float) -> None:
    host = Host()
    asyncio.run(until(100.0 + wait_s, host.clock, host.sleep))
    assert 0.0 <= host.now - (100.0 + wait_s) + 1e-9 < 0.005
    assert host.sleeps < 30


def test_a_moment_that_is_over_is_not_waited_for() -> None:
    host = Host()
    asyncio.run(until(99.0, host.clock, host.sleep))
    assert host.now == 100.0


def test_a_client_that_dies_or_babbles_ends_the_load() -> None:
    ours, theirs = Pipe()
    theirs.send(1.5)
    with pytest.raises(Internal, match="sent float, not str"):
        _receive(ours, str)
    theirs.close()
    with pytest.raises(Internal, match="a client process of the load died"):
        _receive(ours, str)
    ours.close()
