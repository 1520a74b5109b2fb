"""`/health`, `/ready` and gRPC's health service promise that a request is served now; `/live` promises nothing."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from router.api.listeners import SERVICE
from tandem.protocol.messages import Role
from tandem.protocol.mode import Mode
from tests.unit.router.conftest import WITHOUT_RECOVERY, Cluster
from tests.unit.router.fake_cluster import FakeWorker, channel_to, until

ASK = {"model": "fake", "prompt": [5, 6, 7, 8], "max_tokens": 2}
KEY = {"authorization": "Bearer sesame"}


@pytest.fixture
def settings() -> dict[str, Any]:
    return {"api_keys": ("sesame",), **WITHOUT_RECOVERY}


@pytest.fixture
async def http(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://{cluster.endpoints.http_address}", timeout=60) as opened:
        yield opened


async def serving(cluster: Cluster) -> bool:
    """Returns True if gRPC's health service reports SERVING, without an API key."""
    async with channel_to(cluster.endpoints.grpc_address) as channel:
        reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=SERVICE))
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


async def not_ready(cluster: Cluster, http: httpx.AsyncClient) -> str:
    """Returns the reason that both paths give, for GET and HEAD, while `/live` is still 200."""
    reasons = set()
    for path in ("/health", "/ready"):
        reply, head = await http.get(path), await http.head(path)
        assert (reply.status_code, head.status_code, head.content) == (503, 503, b"")
        assert int(reply.headers["retry-after"]) >= 1
        assert reply.json()["status"] == "not ready"
        reasons.add(reply.json()["reason"])
    for ask in (http.get, http.head):
        assert (await ask("/live")).status_code == 200
    assert not await serving(cluster)
    (reason,) = reasons
    return str(reason)


async def test_what_is_missing_is_said_without_a_key(cluster: Cluster, http: httpx.AsyncClient) -> None:
    prefill, decode = cluster.workers
    for path in ("/health", "/ready", "/live"):
        assert (await http.get(path)).status_code == (await http.head(path)).status_code == 200
    assert await serving(cluster)
    assert (await http.get("/v1/models")).status_code == 401
    await cluster.members()
    await until(lambda: not cluster.router.ready, "nobody is left")
    assert "no prefill worker is serving" in await not_ready(cluster, http)
    await cluster.members(prefill)
    assert "no decode worker is serving" in await not_ready(cluster, http)
    decode.not_ready = "5 of 8 KV pages are in quarantine"
    await cluster.members(prefill, decode)
    assert await not_ready(cluster, http) == "worker decode-0 is not ready: 5 of 8 KV pages are in quarantine"
    decode.not_ready = ""
    await cluster.members(prefill, decode)
    await until(lambda: cluster.router.ready, "both take work")
    assert (await http.get("/health")).json() == {"status": "ready"}
    assert (await http.post("/v1/completions", json=ASK, headers=KEY)).status_code == 200


async def test_a_router_that_leaves_is_not_ready(cluster: Cluster, http: httpx.AsyncClient) -> None:
    await cluster.router._dispatcher.drain(0.0)
    assert "shutting down" in await not_ready(cluster, http)


async def test_workers_that_the_mode_leaves_out_do_not_count(cluster: Cluster, http: httpx.AsyncClient) -> None:
    """In disaggregated mode, a worker of role both does not make the cluster ready without a ready prefill worker."""
    placement = cluster.router._dispatcher._policy
    ill = cluster.prefill
    ill.not_ready = "its pages are in quarantine"
    both = await FakeWorker("both-0", Role.BOTH, token="secret").start()
    await cluster.members(ill, both)
    for mode, ready in ((Mode.DISAGGREGATED, False), (Mode.ADAPTIVE, True)):
        placement.mode = mode
        assert (await http.get("/health")).status_code == (200 if ready else 503)


async def test_a_health_watcher_is_answered_at_once(cluster: Cluster, http: httpx.AsyncClient) -> None:
    """Load generators poll health and then send many requests at once, while workers still start one after another."""
    prefill, decode = cluster.workers

    async def start() -> None:
        await cluster.members()
        await cluster.members(prefill)
        decode.not_ready = "its graphs are captured"
        await cluster.members(prefill, decode)
        decode.not_ready = ""
        await cluster.members(prefill, decode)

    for _ in range(5):
        await cluster.controller.set()
        await until(lambda: not cluster.router.ready, "nobody is left")
        starting = asyncio.create_task(start())
        while (await http.get("/health")).status_code != 200:
            pass
        replies = await asyncio.gather(*[http.post("/v1/completions", json=ASK, headers=KEY) for _ in range(20)])
        assert {reply.status_code for reply in replies} == {200}
        await starting
