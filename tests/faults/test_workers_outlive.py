"""`tandem up` is stopped by SIGTERM or SIGKILL and started again, and its workers continue to serve."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.soak import soak

from .streams import Client, Load, Question, undisturbed
from .ups import LOOK_S, WITHIN_S, ups

PROMPTS = [Question(tuple(range(100, 100 + length)), 60) for length in (20, 33, 48)]
LONG_ENOUGH, SHORT = ("--workers-outlive", "600"), ("--workers-outlive", "1")


@soak
@pytest.mark.timeout(900)
async def test_workers_continue_after_their_tandem_up_has_ended(small_model: Path) -> None:
    async with ups(small_model) as cluster:
        first = await cluster.start(*LONG_ENOUGH)
        await first.serves()
        expected = await undisturbed(first.router, PROMPTS)
        workers = cluster.workers()
        assert len(workers) == 2

        await first.end(signal.SIGKILL)
        second = await cluster.start(*LONG_ENOUGH)
        await second.serves()
        assert cluster.workers() == workers, "workers were started anew"
        assert await undisturbed(second.router, PROMPTS) == expected

        async with Client(second.router) as client:
            load = Load(client, PROMPTS, expected, at_once=2)
            third = await cluster.start(*LONG_ENOUGH)
            await third.serves()
            assert await undisturbed(third.router, PROMPTS) == expected
            await second.until("another `tandem up`")

            await third.end(signal.SIGKILL)
            await second.until("the workers are this one's again")
            assert cluster.workers() == workers
            await load.stop()
        assert load.right
        assert not load.refused

        os.kill(min(workers), signal.SIGKILL)
        await second.until("serves again")
        renewed = cluster.workers()
        assert len(renewed) == 2
        assert len(renewed & workers) == 1
        assert await undisturbed(second.router, PROMPTS) == expected

        fourth = await cluster.start(*SHORT, "--decode", "2")
        await fourth.serves()
        assert "decode-1" in await cluster.left(), "it waits for a place, and holds nobody up"
        await second.end(signal.SIGTERM)
        assert "workers live on" in second.said
        assert await undisturbed(fourth.router, PROMPTS) == expected
        assert cluster.workers() == renewed

        await fourth.end(signal.SIGTERM)
        async with asyncio.timeout(WITHIN_S):
            while cluster.workers() or await cluster.left():  # noqa: ASYNC110
                await asyncio.sleep(LOOK_S)
