"""While the only worker of a role is replaced, accepted requests wait and continue, and new ones queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from router.api.listeners import SERVICE
from router.workers.recovery import Recovery
from tandem.metrics import families as f
from tandem.protocol.generated.tandem.v1 import inference_pb2 as pb
from tandem.protocol.messages import ExpectedWorker, Role
from tests.unit.router.conftest import Cluster
from tests.unit.router.fake_cluster import FakeWorker, channel_to, until
from tests.unit.router.test_generate import Client, ask, expected
from tests.unit.router.workers.test_not_ready import say as not_ready

TOKENS = 40
AMID = 10
"""The number of tokens at which streams are held when their worker dies."""
EXPECTED = tuple(ExpectedWorker(f"{role}-0", role) for role in (Role.PREFILL, Role.DECODE))


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[Client]:
    async with channel_to(cluster.endpoints.grpc_address) as channel:
        yield Client(channel)


async def lost(cluster: Cluster, role: Role) -> FakeWorker:
    """Kills the only worker of a role, which the controller notices, and returns the other one."""
    dead = cluster.prefill if role.prefills else cluster.decode
    other = next(worker for worker in cluster.workers if worker is not dead)
    cluster.workers.remove(dead)
    await dead.kill()
    await cluster.controller.set(other)
    await until(lambda: all(link.connected for link in cluster.router._dispatcher.pool.links), "its link is gone")
    return other


async def replaced(cluster: Cluster, role: Role, other: FakeWorker) -> None:
    """Starts the next incarnation of a worker."""
    heir = await FakeWorker(f"{role}-0", role, incarnation=2, token="secret").start()
    await cluster.members(heir, other)


def gauge(cluster: Cluster, family: Any) -> float:
    """Returns the value of one of the router's families without labels."""
    snapshots = cluster.router._dispatcher.metrics.registry.snapshots()
    return next(snapshot.numbers[()] for snapshot in snapshots if snapshot.family is family)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_streams_continue_with_the_same_tokens_and_new_requests_are_queued(
    cluster: Cluster, client: Client, role: Role
) -> None:
    cluster.controller.expected = EXPECTED
    cluster.decode.switches.held_at = AMID
    cluster.prefill.switches.silent_prefill = role is Role.PREFILL
    running = [asyncio.create_task(client.run(ask(TOKENS, prompt=[5, n]))) for n in range(3)]
    at = cluster.prefill if role is Role.PREFILL else cluster.decode
    await until(lambda: len(at.tasks) == 3, "all are at the worker that dies")
    other = await lost(cluster, role)
    running.append(asyncio.create_task(client.run(ask(TOKENS, prompt=[5, 3]))))
    await until(lambda: cluster.router._dispatcher.waiting == 4, "all wait")
    other.go.set()
    await replaced(cluster, role, other)
    for n, (_, ids, _) in enumerate(await asyncio.wait_for(asyncio.gather(*running), 60)):
        assert ids == expected(TOKENS, [5, n])


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_a_worker_that_is_registered_and_unreachable_is_waited_for(
    cluster: Cluster, client: Client, role: Role
) -> None:
    """The router may notice a death before the controller does."""
    dead = cluster.prefill if role.prefills else cluster.decode
    other = next(worker for worker in cluster.workers if worker is not dead)
    cluster.workers.remove(dead)
    await dead.kill()
    await until(lambda: not cluster.router._dispatcher.pool.ready, "the router noticed")
    waits = asyncio.create_task(client.run(ask(8)))
    await until(lambda: cluster.router._dispatcher.waiting == 1, "it waits")
    await replaced(cluster, role, other)
    assert (await waits)[1] == expected(8)


async def test_a_worker_that_ends_after_a_failed_step_gets_no_request_until_it_is_replaced(
    cluster: Cluster, client: Client
) -> None:
    """Its process still answers calls for a while, but refuses event streams: it must not use up attempts."""
    ends = cluster.decode
    other = next(worker for worker in cluster.workers if worker is not ends)
    ends.ending = True
    ends.switches.held_at = AMID
    running = asyncio.create_task(client.run(ask(TOKENS)))
    await until(lambda: bool(ends.tasks), "it decodes")
    reservations = len(ends.reservations)
    for stream in ends.streams.values():
        stream.put_nowait(None)
    await until(lambda: cluster.router._dispatcher.waiting == 1, "it waits")
    await asyncio.sleep(0.5)  # time in which the router tries to attach several times
    assert cluster.router._dispatcher.waiting == 1
    assert len(ends.reservations) == reservations
    cluster.workers.remove(ends)
    await ends.kill()
    await replaced(cluster, Role.DECODE, other)
    assert (await asyncio.wait_for(running, 60))[1] == expected(TOKENS)


@pytest.mark.parametrize("silent", [False, True], ids=["", "beside a silent prefill worker"])
async def test_a_worker_that_is_not_ready_is_waited_for(cluster: Cluster, client: Client, silent: bool) -> None:
    """Pages of transfers that have not ended come back, so requests wait as for a worker that is replaced."""
    await not_ready(cluster, cluster.decode, "too many of its KV pages are in quarantine")
    if silent:
        cluster.prefill.runs.clear()
    waits = asyncio.create_task(client.run(ask(8)))
    await until(lambda: cluster.router._dispatcher.waiting == 1, "it waits")
    cluster.prefill.runs.set()
    await not_ready(cluster, cluster.decode, "")
    assert (await asyncio.wait_for(waits, 60))[1] == expected(8)


async def test_requests_fail_if_no_worker_is_coming(cluster: Cluster, client: Client) -> None:
    cluster.decode.switches.held_at = AMID
    running = asyncio.create_task(client.error(ask(TOKENS)))
    await until(lambda: bool(cluster.decode.tasks), "it decodes")
    await lost(cluster, Role.DECODE)
    for error in (await running, await client.error(ask(8))):
        assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert gauge(cluster, f.DEGRADED) == 0


async def test_waiting_requests_fail_once_no_worker_is_coming_any_more(cluster: Cluster, client: Client) -> None:
    cluster.controller.expected = EXPECTED
    other = await lost(cluster, Role.DECODE)
    running = asyncio.create_task(client.error(ask(8)))
    await until(lambda: cluster.router._dispatcher.waiting == 1, "it waits")
    cluster.controller.expected = ()
    await cluster.controller.set(other)
    assert "no decode worker is serving now" in ((await running).details() or "")


async def test_health_and_metrics_say_degraded(cluster: Cluster, client: Client) -> None:
    cluster.controller.expected = EXPECTED
    reason = "no prefill worker is serving now; requests wait for prefill-0"
    async with httpx.AsyncClient(base_url=f"http://{cluster.endpoints.http_address}", timeout=60) as http:
        assert (await http.get("/health")).json() == {"status": "ready"}
        assert gauge(cluster, f.DEGRADED) == 0
        other = await lost(cluster, Role.PREFILL)
        for path in ("/health", "/ready"):
            reply = await http.get(path)
            assert (reply.status_code, reply.json()) == (200, {"status": "degraded", "reason": reason})
        assert gauge(cluster, f.DEGRADED) == 1
        assert (await client.stub.GetServerInfo(pb.GetServerInfoRequest())).degraded == reason
        async with channel_to(cluster.endpoints.grpc_address) as channel:
            health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=SERVICE))
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        await replaced(cluster, Role.PREFILL, other)
        assert (await http.get("/health")).json() == {"status": "ready"}
        assert (await client.stub.GetServerInfo(pb.GetServerInfoRequest())).degraded == ""
        assert gauge(cluster, f.DEGRADED) == 0


class TestBounds:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"recovery_timeout_s": 0.5, "max_queued_requests": 1}

    async def test_requests_wait_for_a_bounded_time(self, cluster: Cluster, client: Client) -> None:
        cluster.controller.expected = EXPECTED
        await lost(cluster, Role.DECODE)
        error = await asyncio.wait_for(client.error(ask(8)), 60)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "no decode worker is serving now" in (error.details() or "")
        await until(lambda: not cluster.router.ready, "health says so")
        assert gauge(cluster, f.DEGRADED) == 0
        assert "no decode worker" in ((await client.error(ask(8))).details() or "")


class TestQueue:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"max_queued_requests": 1, "queue_timeout_s": 0.1}

    async def test_the_queue_is_bounded_and_its_deadline_counts_from_the_recovery(
        self, cluster: Cluster, client: Client
    ) -> None:
        cluster.controller.expected = EXPECTED
        other = await lost(cluster, Role.DECODE)
        waits = asyncio.create_task(client.run(ask(8)))
        dispatcher = cluster.router._dispatcher
        await until(lambda: dispatcher.waiting == 1, "it waits")
        assert (await client.error(ask(8))).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        (request,) = dispatcher._live.values()
        request.waiting_since -= 100.0
        dispatcher._sweeper._sweep(dispatcher._sweeper._clock())
        await replaced(cluster, Role.DECODE, other)
        assert (await waits)[1] == expected(8)


def test_the_time_of_a_recovery_does_not_count_as_waiting() -> None:
    now = 100.0
    recovery = Recovery(30.0, lambda: now)
    assert not recovery.update(recovering=False)
    assert recovery.waited_s(90.0) == 10.0
    assert recovery.update(recovering=True)
    now = 129.0
    assert not recovery.update(recovering=True)
    assert recovery.waits
    assert recovery.waited_s(90.0) == 0.0
    assert recovery.update(recovering=False)
    now = 131.0
    assert recovery.waited_s(90.0) == 2.0
    assert recovery.waited_s(130.0) == 1.0


def test_a_recovery_ends_after_its_longest_time_and_the_next_begins_anew() -> None:
    now = 100.0
    recovery = Recovery(30.0, lambda: now)
    recovery.update(recovering=True)
    now = 130.0
    assert recovery.update(recovering=True)
    assert not recovery.waits
    recovery.update(recovering=False)
    assert recovery.update(recovering=True)
    assert recovery.waits


def test_nothing_waits_without_time_for_a_recovery() -> None:
    recovery = Recovery(0.0, lambda: 100.0)
    assert not recovery.update(recovering=True)
    assert not recovery.waits
