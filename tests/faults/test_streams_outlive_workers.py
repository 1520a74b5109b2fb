"""Two prefill and two decode workers: whichever dies or is suspended, every stream continues with the same tokens.

Runs in `make soak` only; `test_killed_workers.py` and `test_processes_that_hang.py` have such faults for `make test`.
TANDEM_FAULT_SAVE=1 saves the measurements of the restarts.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.soak import soak

from .conftest import VOCAB
from .growth import MIB, Growth
from .moments import LOOK_S, AmidTransfer, busy, freeze_amid_transfer, kill, restarted, thawed
from .streams import AT_ONCE, LONG_PROMPT_TOKENS, SHORT_PROMPT_TOKENS, Client, Load, Question, Stream, undisturbed
from .traffic import IN_DECODE, in_flight_when_suspended

pytestmark = soak

STILL_S = 3.0
RESTARTS = 30
"""The number of restarts of each role."""
REFUSED_MAX = RESTARTS // 10
"""The number of requests that may be rejected with a clear error.

The router makes at most three attempts, and where prefill workers die faster than pages leave quarantine, no decode
worker is ready for some seconds.
"""
KV_CACHE_BYTES = 45 * MIB // 4
"""5,120 tokens of 8-bit KV: 32 codes and a scale for each layer, head and part."""
CHUNK_TOKENS = 16


@pytest.fixture(scope="module")
def questions() -> list[Question]:
    """Short prompts, and at last a long one of many chunks."""
    rng = random.Random(4)
    lengths = (*SHORT_PROMPT_TOKENS, LONG_PROMPT_TOKENS)
    return [Question(tuple(rng.randrange(3, VOCAB) for _ in range(length))) for length in lengths]


@pytest.fixture(scope="module")
def cluster(running_cluster: Callable[..., Any], small_model: Path) -> Any:
    return running_cluster(
        model=small_model,
        prefill=2,
        decode=2,
        dtype="float32",
        kv_cache_dtype="int8",
        page_tokens=16,
        max_step_tokens=CHUNK_TOKENS,
        kv_cache_bytes=KV_CACHE_BYTES,
        hang_deadline_s=0.0,  # a suspended worker is not killed
    )


@pytest.fixture(scope="module")
def expected(cluster: Any, questions: list[Question]) -> list[list[int]]:
    return asyncio.run(undisturbed(cluster.grpc_address, questions))


@dataclass(frozen=True, slots=True)
class Struck:
    """The streams of all questions, and the tokens that each had when the fault struck."""

    streams: list[Stream]
    tokens_before: list[int]
    moment: AmidTransfer


async def struck(cluster: Any, questions: list[Question], strike: Callable[[AmidTransfer], None]) -> Struck:
    """Sends all questions; the fault strikes while the short ones decode and the long one is transferred."""
    async with Client(cluster.grpc_address) as client:
        streams = [client.ask(question) for question in questions[:-1]]
        await asyncio.gather(*(stream.reached(IN_DECODE) for stream in streams))
        streams.append(client.ask(questions[-1], "long"))
        moment = await asyncio.to_thread(freeze_amid_transfer, cluster)
        with thawed(moment.prefill, moment.decode):
            before = [len(stream.tokens) for stream in streams]
            await asyncio.to_thread(strike, moment)
        await asyncio.gather(*(stream.task for stream in streams))
        return Struck(streams, before, moment)


def moved(cluster: Any, streams: list[Stream]) -> list[Stream]:
    """Returns the streams that the router retried with other workers."""
    again = [line for line in cluster.log("router").splitlines() if "failed, retrying: " in line]
    return [stream for stream in streams if any(f"request {stream.name}~" in line for line in again)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_streams_survive_a_death_amid_transfer_and_decode(
    role: str, cluster: Any, questions: list[Question], expected: list[list[int]]
) -> None:
    result = asyncio.run(struck(cluster, questions, lambda moment: kill(getattr(moment, role))))
    for stream, tokens in zip(result.streams, expected, strict=True):
        stream.check(tokens)
    again = moved(cluster, result.streams)
    assert result.streams[-1] in again
    if role == "decode":
        # On a fast machine all other streams may have ended by then.
        in_decode = [n for n, stream in enumerate(result.streams[:-1]) if stream in again]
        assert all(IN_DECODE <= result.tokens_before[n] < len(expected[n]) for n in in_decode)
    restarted(cluster, getattr(result.moment, role))
    cluster.assert_idle_and_sound()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_suspended_amid_a_transfer_completes_it(
    role: str, cluster: Any, questions: list[Question], expected: list[list[int]]
) -> None:
    def strike(moment: AmidTransfer) -> None:
        if role == "decode":
            os.kill(moment.decode.pid, signal.SIGSTOP)
            os.kill(moment.prefill.pid, signal.SIGCONT)
        time.sleep(STILL_S)

    before = [(one.pid, one.incarnation) for one in cluster.workers()]
    result = asyncio.run(struck(cluster, questions, strike))
    for stream, tokens in zip(result.streams, expected, strict=True):
        stream.check(tokens)
    cluster.assert_idle_and_sound()
    assert [(one.pid, one.incarnation) for one in cluster.workers()] == before


@pytest.mark.timeout(900)
def test_streams_leave_a_suspended_worker_and_it_continues(
    cluster: Any, questions: list[Question], expected: list[list[int]]
) -> None:
    """Its streams go on with other workers at once, and when it runs again it drops its work for them."""
    logged = len(cluster.log("router"))
    streams, victim = asyncio.run(in_flight_when_suspended(cluster, questions[:-1]))
    try:
        assert psutil.Process(victim.pid).status() == psutil.STATUS_STOPPED
        for stream, tokens in zip(streams, expected[:-1], strict=True):
            stream.check(tokens)
        assert f"worker {victim.name} does not respond" in cluster.log("router")[logged:]
    finally:
        os.kill(victim.pid, signal.SIGCONT)
    cluster.assert_idle_and_sound()
    assert cluster.named(victim.name) == victim


@pytest.mark.timeout(300 + 60 * RESTARTS)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_restarts_under_load_leak_neither_descriptors_nor_memory(
    role: str, cluster: Any, questions: list[Question], expected: list[list[int]]
) -> None:
    """The router and the other role survive all restarts without one more file descriptor.

    A memory leak is found from a dozen restarts of each role on: a few show only memory that a process touches once.
    """
    survivors = [cluster.router(), *(one for one in cluster.workers() if not one.name.startswith(role))]
    growth = Growth(survivors, KV_CACHE_BYTES)

    async def restart_all() -> Load:
        async with Client(cluster.grpc_address) as client:
            load = Load(client, questions, expected)
            for number in range(RESTARTS):
                await asyncio.to_thread(wait_for_work)
                victim = cluster.named(f"{role}-{number % 2}")
                kill(victim)
                await asyncio.to_thread(restarted, cluster, victim)
                growth.look()
            await load.stop()
            return load

    def wait_for_work() -> None:
        deadline_s = time.monotonic() + 60
        while not busy(cluster, role, lambda one: one.requests):
            assert time.monotonic() < deadline_s, f"no {role} worker has work"
            time.sleep(LOOK_S)

    load = asyncio.run(restart_all())
    if "TANDEM_FAULT_SAVE" in os.environ:
        growth.save(role, right=load.right, refused=load.refused)
    assert load.right >= AT_ONCE
    assert len(load.refused) <= REFUSED_MAX, load.refused
    cluster.assert_idle_and_sound()
    assert {one.pid for one in survivors} <= {one.pid for one in (cluster.router(), *cluster.workers())}
    growth.check()
