"""The streams of a worker that does not respond continue on another, and its late messages are dropped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from router.workers.liveness import BEATS, LivenessProbe
from tandem.metrics import families as f
from tandem.protocol.errors import Unavailable
from tandem.protocol.messages import Role
from tests.unit.router.conftest import Cluster
from tests.unit.router.fake_cluster import FakeWorker, channel_to, until
from tests.unit.router.test_generate import Client, ask, expected
from tests.unit.router.workers.test_recovery import gauge

SILENCE_S = 0.8
TOKENS = 60


@pytest.fixture
def settings() -> dict[str, Any]:
    return {"worker_silence_s": SILENCE_S, "max_attempts": 10}


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[Client]:
    async with channel_to(cluster.endpoints.grpc_address) as channel:
        yield Client(channel)


async def with_another(cluster: Cluster, role: Role) -> list[FakeWorker]:
    """Adds a second worker of a role and returns both."""
    second = await FakeWorker(f"{role}-1", role, token="secret").start()
    await cluster.members(*cluster.workers, second)
    return [worker for worker in cluster.workers if worker.role is role]


async def test_a_stream_leaves_a_suspended_decode_worker(cluster: Cluster, client: Client) -> None:
    both = await with_another(cluster, Role.DECODE)
    for worker in both:
        worker.switches.step_s = 0.02
    running = asyncio.create_task(client.run(ask(TOKENS)))
    await until(lambda: any(worker.tasks for worker in both), "it decodes")
    first = next(worker for worker in both if worker.tasks)
    first.runs.clear()
    _, ids, _ = await asyncio.wait_for(running, 60)
    assert ids == expected(TOKENS)
    assert first.aborted == [], "it is still suspended"
    before = gauge(cluster, f.STALE_EVENTS)
    first.runs.set()
    await until(lambda: first.idle and bool(first.aborted), "its work for the request is aborted")
    await until(lambda: gauge(cluster, f.STALE_EVENTS) > before, "its late tokens are dropped and counted")
    dispatcher = cluster.router._dispatcher
    await until(lambda: len(dispatcher.pool.fleet.live) == 3, "it gets requests again")


async def test_a_stream_leaves_a_suspended_prefill_worker(cluster: Cluster, client: Client) -> None:
    both = await with_another(cluster, Role.PREFILL)
    for worker in both:
        worker.switches.silent_prefill = True
    running = asyncio.create_task(client.run(ask(8)))
    await until(lambda: any(worker.prefills for worker in both), "it is placed")
    first, second = sorted(both, key=lambda worker: not worker.prefills)
    second.switches.silent_prefill = False
    first.runs.clear()
    _, ids, _ = await asyncio.wait_for(running, 60)
    assert ids == expected(8)
    first.runs.set()
    await until(lambda: first.idle, "its work for the request is aborted")


async def test_a_request_that_no_other_worker_can_serve_stays(cluster: Cluster, client: Client) -> None:
    worker = cluster.decode
    worker.switches.held_at = 10
    running = asyncio.create_task(client.run(ask(TOKENS)))
    await until(lambda: bool(worker.tasks), "it decodes")
    dispatcher = cluster.router._dispatcher
    worker.runs.clear()
    await until(lambda: any(link.silent for link in dispatcher.pool.links), "the worker is silent")
    assert dispatcher.degraded
    later = asyncio.create_task(client.run(ask(8)))
    await until(lambda: dispatcher.waiting == 1, "a new request waits")
    worker.go.set()
    worker.runs.set()
    assert (await running)[1] == expected(TOKENS)
    assert (await later)[1] == expected(8)
    assert [task.ref.attempt for task in cluster.prefill.prefills] == [1, 1]


async def test_requests_of_a_silent_worker_move_once_there_is_another(cluster: Cluster, client: Client) -> None:
    first = cluster.decode
    first.switches.held_at = 10
    running = asyncio.create_task(client.run(ask(TOKENS)))
    await until(lambda: bool(first.tasks), "it decodes")
    first.runs.clear()
    pool = cluster.router._dispatcher.pool
    await until(lambda: any(link.silent for link in pool.links), "the worker is silent")
    second = await FakeWorker("decode-1", Role.DECODE, token="secret").start()
    cluster.extra.append(second)
    await cluster.controller.set(*cluster.workers, second)
    assert (await asyncio.wait_for(running, 60))[1] == expected(TOKENS)
    first.runs.set()
    await until(lambda: first.idle, "its work for the request is aborted")


async def test_a_long_step_is_no_silence(cluster: Cluster, client: Client) -> None:
    both = await with_another(cluster, Role.DECODE)
    for worker in both:
        worker.switches.step_s = 3 * SILENCE_S
    _, ids, _ = await asyncio.wait_for(client.run(ask(3)), 60)
    assert ids == expected(3)
    assert len(cluster.prefill.prefills) == 1


async def test_heartbeats_stop_while_no_request_depends_on_the_worker() -> None:
    asked, changes = 0, 0
    needed = False

    async def ask_worker() -> None:
        nonlocal asked
        asked += 1
        raise Unavailable("it does not respond")

    def changed() -> None:
        nonlocal changes
        changes += 1

    probe = LivenessProbe(ask_worker, 0.02, needed=lambda: needed, on_change=changed)
    run = asyncio.create_task(probe.run())
    await asyncio.sleep(0.1)
    assert (asked, probe.silent) == (0, False)
    needed = True
    await until(lambda: probe.silent, "it is silent")
    assert asked >= BEATS
    assert changes == 1
    needed = False
    await until(lambda: not probe.silent, "nothing depends on it")
    assert changes == 2
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
