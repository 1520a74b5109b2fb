"""A worker, router or controller that is suspended lives and keeps its sockets open, but does nothing.

Its supervisor kills it and continues as after any other death. The streams of a worker leave it before.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from wire.errors import Unavailable

from .moments import LOOK_S, busy, restarted
from .streams import Client, Question, Stream, undisturbed
from .traffic import serves_again

HANG_DEADLINE_S = 8.0
"""Short, and still far longer than any process here waits for a core."""
QUESTIONS = [Question((5, 6, 7, 8 + n), 400) for n in range(6)]
IN_DECODE = 3


@pytest.fixture
def cluster(running_cluster: Callable[..., Any], small_model: Path) -> Any:
    return running_cluster(
        model=small_model, decode=2, dtype="float32", page_tokens=16, hang_deadline_s=HANG_DEADLINE_S
    )


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


async def stopped_amid(cluster: Any) -> tuple[list[Stream], Any]:
    """Streams in flight, and the decode worker of some of them, which was suspended."""
    async with Client(cluster.grpc_address) as client:
        streams = [client.ask(question) for question in QUESTIONS]
        await asyncio.gather(*(stream.reached(IN_DECODE) for stream in streams))
        decoding = await asyncio.to_thread(busy, cluster, "decode", lambda one: one.requests)
        victim = cluster.named(decoding[0])
        stop(victim.pid)
        await asyncio.gather(*(stream.task for stream in streams))
        return streams, victim


@pytest.mark.timeout(900)
def test_a_worker_that_hangs(cluster: Any) -> None:
    expected = asyncio.run(undisturbed(cluster.grpc_address, QUESTIONS))
    streams, victim = asyncio.run(stopped_amid(cluster))
    for stream, tokens in zip(streams, expected, strict=True):
        stream.check(tokens)
    after = restarted(cluster, victim)
    assert not psutil.pid_exists(victim.pid)
    assert after.restarts == victim.restarts + 1
    assert "no sign of life" in after.error
    cluster.assert_idle_and_sound()


@pytest.mark.timeout(900)
def test_streams_leave_a_suspended_worker_and_it_continues(
    running_cluster: Callable[..., Any], small_model: Path
) -> None:
    """Here nothing kills it: its streams go on at once, and when it runs again it drops its work for them."""
    cluster = running_cluster(model=small_model, decode=2, dtype="float32", page_tokens=16, hang_deadline_s=0.0)
    expected = asyncio.run(undisturbed(cluster.grpc_address, QUESTIONS))
    streams, victim = asyncio.run(stopped_amid(cluster))
    try:
        assert psutil.Process(victim.pid).status() == psutil.STATUS_STOPPED
        for stream, tokens in zip(streams, expected, strict=True):
            stream.check(tokens)
        assert f"worker {victim.name} does not respond" in cluster.log("router")
    finally:
        os.kill(victim.pid, signal.SIGCONT)
    cluster.assert_idle_and_sound()
    assert cluster.named(victim.name) == victim


@pytest.mark.timeout(900)
def test_a_router_that_hangs(cluster: Any) -> None:
    before = cluster.router()
    stop(before.pid)
    give_up = time.monotonic() + 90
    while (now := cluster.router()).incarnation == before.incarnation or now.phase != "serving":
        assert time.monotonic() < give_up, now
        time.sleep(LOOK_S)
    assert "no sign of life" in now.error
    assert asyncio.run(serves_again(cluster.grpc_address, 60, QUESTIONS[0].request())) == QUESTIONS[0].tokens


@pytest.mark.timeout(900)
def test_a_controller_that_hangs(cluster: Any, request: pytest.FixtureRequest) -> None:
    """`tandem up` exits with the controller, reports why, and leaves no process; its own supervisor restarts it."""
    try:
        pids = [cluster.controller_pid(), cluster.router().pid, *(one.pid for one in cluster.workers())]
        stop(pids[0])
        with pytest.raises(Unavailable, match="the controller gave no sign of life for 8 s and was killed"):
            cluster._cluster.wait(90)
        assert not [pid for pid in pids if psutil.pid_exists(pid)]
    finally:
        request.getfixturevalue("_shelf").clear()
