"""A rank of a worker hangs or is killed: its ranks end together, and every request gets the tokens of a quiet cluster.

TANDEM_RANK_DEATHS is the number of random deaths in `make soak`.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest

from tests.soak import soak

from .fault_kinds import ranks_of
from .moments import restarted
from .streams import AT_ONCE, Client, Load, Question, Stream, undisturbed

IN_DECODE = 3
DEATHS = int(os.environ.get("TANDEM_RANK_DEATHS", "100"))
QUESTIONS = [Question((5, 6, 7, 8 + n), 60) for n in range(3)]
LATER = Question((5, 6, 7, 99), 20)
"""A request that arrives after the death."""


async def struck_amid(cluster: Any, pid: int, fault: signal.Signals) -> list[Stream]:
    async with Client(cluster.grpc_address) as client:
        streams = [client.ask(question) for question in QUESTIONS]
        await asyncio.gather(*(stream.reached(IN_DECODE) for stream in streams))
        os.kill(pid, fault)
        streams.append(client.ask(LATER))
        await asyncio.gather(*(stream.task for stream in streams))
        return streams


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("role", "ranks"),
    [
        ("decode", {"decode_tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
        pytest.param("prefill", {"context_parallel_size": 2}, marks=soak),
    ],
)
def test_no_answer_is_lost_when_a_rank_hangs_or_dies_and_all_ranks_restart(
    role: str, ranks: dict[str, int], running_cluster: Callable[..., Any], small_model: Path
) -> None:
    cluster = running_cluster(model=small_model, dtype="float32", prefill=1, decode=1, kv_cache_bytes=1 << 27, **ranks)
    expected = asyncio.run(undisturbed(cluster.grpc_address, [*QUESTIONS, LATER]))
    for fault in (signal.SIGSTOP, signal.SIGKILL):
        before = cluster.worker(role)
        (follower,) = ranks_of(before.pid)
        struck = follower.pid if fault is signal.SIGSTOP else before.pid
        streams = asyncio.run(struck_amid(cluster, struck, fault))
        for stream, tokens in zip(streams, expected, strict=True):
            stream.check(tokens)
        after = restarted(cluster, before)
        assert len(ranks_of(after.pid)) == 1
        psutil.wait_procs([follower], timeout=20)
        assert not follower.is_running()
    cluster.assert_idle_and_sound()


@pytest.mark.timeout(600)
def test_kv_of_ranks_that_divide_tokens_is_handed_over_like_that_of_one_rank(
    running_cluster: Callable[..., Any], small_model: Path
) -> None:
    settings: dict[str, Any] = {"model": small_model, "dtype": "float32", "prefill": 1, "decode": 1}
    questions = [Question(tuple(range(5, 42 + n)), 20) for n in range(3)]
    answers = []
    for ranks in (1, 2):
        cluster = running_cluster(**settings, context_parallel_size=ranks, kv_cache_bytes=1 << 27)
        answers.append(asyncio.run(undisturbed(cluster.grpc_address, questions)))
        assert len(ranks_of(cluster.worker("prefill").pid)) == ranks - 1
        cluster.assert_idle_and_sound()
    assert answers[0] == answers[1]


@soak
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.timeout(300 + 60 * DEATHS)
def test_no_answer_is_wrong_or_hangs_when_ranks_die_at_random_moments_under_load(
    running_cluster: Callable[..., Any], small_model: Path, ranks: int
) -> None:
    """The restarts of workers of two ranks are measured beside those of workers of one."""
    cluster = running_cluster(
        model=small_model, dtype="float32", prefill=2, decode=2, tensor_parallel_size=ranks, kv_cache_bytes=1 << 27
    )
    expected = asyncio.run(undisturbed(cluster.grpc_address, QUESTIONS))
    rng = random.Random(11)
    restarts_s: list[float] = []

    async def kill_at_random() -> Load:
        async with Client(cluster.grpc_address) as client:
            load = Load(client, QUESTIONS, expected)
            for _ in range(DEATHS):
                await asyncio.sleep(rng.random())
                worker = rng.choice(cluster.workers())
                ranks = [worker.pid, *(follower.pid for follower in ranks_of(worker.pid))]
                os.kill(rng.choice(ranks), signal.SIGKILL)
                killed_at = time.monotonic()
                await asyncio.to_thread(restarted, cluster, worker)
                restarts_s.append(time.monotonic() - killed_at)
            await load.stop()
            return load

    load = asyncio.run(kill_at_random())
    print(
        f"{DEATHS} deaths in workers of {ranks} ranks: {load.right} answers right, {len(load.refused)} refused;"
        f" restarts in {median(restarts_s):.1f} s (median), at most {max(restarts_s):.1f} s"
    )
    assert load.right >= AT_ONCE
    assert len(load.refused) <= DEATHS // 10, load.refused
    cluster.assert_idle_and_sound()
