"""Workers that report not ready get no new requests, and the router reports why requests wait."""

import asyncio

import grpc.aio
import httpx
import pytest

from tandem.net.rpc import RETRY_AFTER
from tandem.protocol.generated.tandem.v1 import inference_pb2 as pb
from tandem.protocol.generated.tandem.v1 import inference_pb2_grpc
from tandem.protocol.messages import Role
from tests.unit.router.conftest import WITHOUT_RECOVERY, Cluster
from tests.unit.router.fake_cluster import FakeWorker, answer_token, until

PROMPT = [5, 6, 7, 8]
LOST = "5 of 8 KV pages are in quarantine; look at prefill-0"
ASK = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), options=pb.GenerationOptions(max_tokens=6))


async def run(stub: inference_pb2_grpc.InferenceStub) -> list[int]:
    return [token async for message in stub.Generate(ASK) for token in message.chunk.token_ids]


async def say(cluster: Cluster, worker: FakeWorker, not_ready: str) -> None:
    """Registers `worker` again with this reason, as it does when its facts have changed."""
    worker.not_ready = not_ready
    await cluster.controller.set(*cluster.workers)
    link = cluster.router._dispatcher.pool.link(worker.info.peer)
    await until(lambda: link.info.not_ready == not_ready, "the router heard it")


@pytest.mark.parametrize("settings", [WITHOUT_RECOVERY])
async def test_the_only_decode_worker_is_not_ready(cluster: Cluster, stub: inference_pb2_grpc.InferenceStub) -> None:
    await say(cluster, cluster.decode, LOST)
    assert not cluster.router.ready
    async with httpx.AsyncClient() as http:
        reply = await http.get(f"http://{cluster.endpoints.http_address}/ready")
    assert reply.status_code == 503
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await run(stub)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert caught.value.details() == f"worker {cluster.decode.worker_id} is not ready: {LOST}"
    assert RETRY_AFTER in dict(caught.value.trailing_metadata() or ())
    assert not cluster.decode.reservations

    await say(cluster, cluster.decode, "")
    assert cluster.router.ready
    assert await run(stub) == [answer_token(PROMPT, index) for index in range(6)]


async def test_what_waits_goes_on_waiting(cluster: Cluster, stub: inference_pb2_grpc.InferenceStub) -> None:
    cluster.decode.switches.refuse_reserve = 10**9
    waiting = asyncio.create_task(run(stub))
    await until(lambda: cluster.decode.reservations, "it has tried")
    await say(cluster, cluster.decode, LOST)
    await until(lambda: cluster.router._dispatcher.waiting == 1, "it waits")
    cluster.decode.switches.refuse_reserve = 0
    assert not waiting.done()
    await say(cluster, cluster.decode, "")
    assert await waiting == [answer_token(PROMPT, index) for index in range(6)]


async def test_others_take_the_work(cluster: Cluster, stub: inference_pb2_grpc.InferenceStub) -> None:
    other = await FakeWorker("decode-1", Role.DECODE, token="secret").start()
    ill = cluster.decode
    await cluster.members(cluster.prefill, ill, other)
    await say(cluster, ill, LOST)
    assert cluster.router.ready
    for _ in range(3):
        assert len(await run(stub)) == 6
    assert len(other.reservations) == 3
    assert not ill.reservations


async def test_the_router_shows_it(cluster: Cluster, stub: inference_pb2_grpc.InferenceStub) -> None:
    await say(cluster, cluster.decode, LOST)
    info = await stub.GetServerInfo(pb.GetServerInfoRequest())
    assert {worker.worker_id: worker.not_ready for worker in info.workers}[cluster.decode.worker_id] == LOST


async def test_a_drain_ends_what_waits_as_well(cluster: Cluster, stub: inference_pb2_grpc.InferenceStub) -> None:
    """A queued request is at no worker yet; without this its client would wait until the process exits."""
    cluster.decode.switches.refuse_reserve = 10**9
    waiting = asyncio.create_task(run(stub))
    dispatcher = cluster.router._dispatcher
    await until(lambda: dispatcher.waiting == 1, "it waits")
    await dispatcher.drain(0.0)
    assert dispatcher.waiting == 0
    with pytest.raises(grpc.aio.AioRpcError, match="shutting down") as caught:
        await waiting
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
