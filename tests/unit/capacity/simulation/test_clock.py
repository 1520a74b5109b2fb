"""Virtual time, for planned calls and for coroutines."""

import asyncio
import math

import pytest

from tandem.capacity.simulation.clock import VirtualLoop


def test_calls_run_in_the_order_of_their_times_and_then_of_their_planning() -> None:
    loop, seen = VirtualLoop(), []
    for moment, name in ((2.0, "late"), (1.0, "first"), (1.0, "second"), (math.inf, "never")):
        loop.at(moment, lambda name=name: seen.append((name, loop.now)))  # type: ignore[misc]
    loop.run(until=1.5)
    assert seen == [("first", 1.0), ("second", 1.0)]
    loop.run()
    assert seen[2:] == [("late", 2.0)]
    assert loop() == 2.0


def test_a_call_for_a_time_that_has_passed_runs_now() -> None:
    loop, seen = VirtualLoop(10.0), []
    loop.at(3.0, lambda: seen.append(loop.now))
    loop.run()
    assert seen == [10.0]


def test_what_a_call_makes_ready_runs_before_the_next_call() -> None:
    loop, seen = VirtualLoop(), []
    event = asyncio.Event()

    async def wait() -> None:
        await event.wait()
        seen.append(("woken", loop.now))
        await asyncio.sleep(0.5)
        seen.append(("slept", loop.now))

    loop.create_task(wait())
    loop.at(1.0, event.set)
    loop.at(1.0, lambda: seen.append(("next", loop.now)))
    loop.advance(2.0)
    assert seen == [("woken", 1.0), ("next", 1.0), ("slept", 1.5)]
    assert loop.now == 2.0


def test_a_timeout_ends_a_wait_in_virtual_time() -> None:
    loop = VirtualLoop()

    async def wait() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30.0):
                await asyncio.Event().wait()
        return loop.now

    task = loop.create_task(wait())
    loop.run()
    assert task.result() == 30.0


def test_an_uncaught_error_is_raised_where_the_loop_runs() -> None:
    loop = VirtualLoop()
    loop.call_later(1.0, lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loop.run()
