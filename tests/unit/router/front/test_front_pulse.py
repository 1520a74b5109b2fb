"""A front process hangs after a number of unanswered checks; here the checks take no time."""

import asyncio
from collections.abc import Callable

import pytest

from router.front.pulse import SILENT_LOOKS, STARTING_LOOKS, Pulse


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.front.pulse.LOOK_S", 0.0)


async def asked_until_it_hangs(answers: Callable[[int], bool]) -> int:
    """Returns the number of checks until a process that answers only where `answers` is true counts as hanging."""
    count = 0

    def ask() -> None:
        nonlocal count
        count += 1
        if answers(count):
            asyncio.get_running_loop().call_soon(pulse.beat)

    pulse = Pulse(ask)
    async with asyncio.timeout(10):
        await pulse.stops()
    return count


async def test_who_answers_now_and_then_is_busy() -> None:
    """One answer in SILENT_LOOKS checks is enough."""
    assert await asked_until_it_hangs(lambda ask: ask % SILENT_LOOKS == 1 and ask < 1000) == 997 + SILENT_LOOKS


async def test_who_answers_no_more_hangs() -> None:
    assert await asked_until_it_hangs(lambda ask: ask <= 5) == 5 + SILENT_LOOKS


async def test_who_starts_has_more_time() -> None:
    assert SILENT_LOOKS < STARTING_LOOKS
    assert await asked_until_it_hangs(lambda _: False) == STARTING_LOOKS
    assert await asked_until_it_hangs(lambda ask: ask == STARTING_LOOKS) == STARTING_LOOKS + SILENT_LOOKS
