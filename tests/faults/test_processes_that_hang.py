"""A worker, router or controller that is suspended lives and keeps its sockets open, but does nothing.

Its supervisor kills it and continues as after any other death, of which there are some here, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import openai
import psutil
import pytest

from tandem.protocol.errors import Unavailable
from tests.soak import soak

from .moments import LOOK_S, kill, restarted
from .streams import Client, Question, Stream, undisturbed
from .traffic import IN_DECODE, in_flight_when_suspended, serves_again

HANG_DEADLINE_S = 8.0
"""Short, and still far longer than any process here waits for a core."""
PROMPTS = [Question((5, 6, 7, 8 + n), 400) for n in range(6)]
RESTART_WITHIN_S = 240.0
"""Far longer than the hang deadline and a start, even when other tests load the cores."""


@pytest.fixture(scope="module")
def cluster(running_cluster: Callable[..., Any], small_model: Path) -> Any:
    return running_cluster(
        model=small_model, decode=2, dtype="float32", page_tokens=16, hang_deadline_s=HANG_DEADLINE_S
    )


@pytest.fixture(scope="module")
def expected(cluster: Any) -> list[list[int]]:
    return asyncio.run(undisturbed(cluster.grpc_address, PROMPTS))


@pytest.mark.timeout(900)
def test_a_worker_that_hangs_is_replaced_and_its_streams_continue(cluster: Any, expected: list[list[int]]) -> None:
    streams, victim = asyncio.run(in_flight_when_suspended(cluster, PROMPTS))
    for stream, tokens in zip(streams, expected, strict=True):
        stream.check(tokens)
    after = restarted(cluster, victim)
    assert not psutil.pid_exists(victim.pid)
    assert after.restarts > victim.restarts
    assert f"{victim.name} is gone (it gave no sign of life" in cluster.log("controller")
    cluster.assert_idle_and_sound()


@pytest.mark.timeout(900)
def test_a_router_that_hangs_is_replaced(cluster: Any) -> None:
    before = cluster.router()
    os.kill(before.pid, signal.SIGSTOP)
    deadline_s = time.monotonic() + RESTART_WITHIN_S
    while (now := cluster.router()).incarnation == before.incarnation or now.phase != "serving":
        assert time.monotonic() < deadline_s, now
        time.sleep(LOOK_S)
    # Its replacement may be refused a port that the killed process still holds, and be started once more.
    assert "router is gone (it gave no sign of life" in cluster.log("controller")
    assert asyncio.run(serves_again(cluster.grpc_address, 60, PROMPTS[0].request())) == PROMPTS[0].tokens


def standby_after(cluster: Any, incarnation: int) -> None:
    """Waits for a standby that is younger than the router of this incarnation."""
    deadline_s = time.monotonic() + RESTART_WITHIN_S
    while not any(
        int(number) > incarnation
        for number in re.findall(r"router#(\d+) \S+ router \S+ is ready to open", cluster.log("router"))
    ):
        assert time.monotonic() < deadline_s, "no standby was started"
        time.sleep(LOOK_S)


def members_after(cluster: Any, controller: int) -> set[str]:
    """Returns the workers that serve, from the controller that replaces the one of this process id."""
    deadline_s = time.monotonic() + RESTART_WITHIN_S
    while True:
        with contextlib.suppress(Unavailable, grpc.RpcError):
            if cluster.controller_pid() != controller:
                return {one.peer.worker_id for one in cluster.members()}
        assert time.monotonic() < deadline_s, "the controller was not restarted"
        time.sleep(LOOK_S)


async def amid_streams(cluster: Any, strike: Callable[[], None]) -> list[Stream]:
    """Returns streams that decoded when `strike` was called, once they have ended."""
    async with Client(cluster.grpc_address) as client:
        streams = [client.ask(question) for question in PROMPTS]
        await asyncio.gather(*(stream.reached(IN_DECODE) for stream in streams))
        strike()
        await asyncio.gather(*(stream.task for stream in streams))
        return streams


@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [pytest.param(signal.SIGSTOP, marks=soak), signal.SIGKILL])
def test_a_controller_that_hangs_or_dies_is_replaced_and_streams_continue(
    cluster: Any, expected: list[list[int]], number: signal.Signals
) -> None:
    """Another one adopts router and workers: streams go on, and operators reach it at the same address."""
    pid, served = cluster.controller_pid(), [cluster.router(), *cluster.workers()]
    streams = asyncio.run(amid_streams(cluster, lambda: os.kill(pid, number)))
    for stream, tokens in zip(streams, expected, strict=True):
        stream.check(tokens)

    assert members_after(cluster, pid) == {"prefill-0", "decode-0", "decode-1"}
    assert not psutil.pid_exists(pid)
    after = [cluster.router(), *cluster.workers()]
    assert [(one.name, one.pid, one.incarnation) for one in after] == [
        (one.name, one.pid, one.incarnation) for one in served
    ]
    assert asyncio.run(undisturbed(cluster.grpc_address, PROMPTS[:1])) == expected[:1]

    victim = cluster.worker("decode")
    kill(victim)
    assert restarted(cluster, victim).restarts == 1
    cluster.assert_idle_and_sound()


@pytest.mark.timeout(900)
def test_clients_that_retry_do_not_notice_that_the_router_is_killed(cluster: Any) -> None:
    """The standby opens the listeners within the waits of OpenAI's client, and another standby follows."""
    killed = cluster.router()
    standby_after(cluster, killed.incarnation)
    os.kill(killed.pid, signal.SIGKILL)
    began = time.monotonic()
    with openai.OpenAI(base_url=f"http://{cluster.http_address}/v1", api_key="none", max_retries=5) as client:
        answer = client.completions.create(model="SmolLM2-135M-Instruct", prompt=list(PROMPTS[0].prompt), max_tokens=4)
    print(f"answered after {time.monotonic() - began:.1f} s")
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 0
    after = cluster.router()
    assert after.incarnation > killed.incarnation
    standby_after(cluster, after.incarnation)
