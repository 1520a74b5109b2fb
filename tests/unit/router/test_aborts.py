"""A worker that stalls while a request or an attempt is aborted receives the abort when it continues."""

import asyncio

from tandem.protocol.generated.tandem.v1 import inference_pb2 as pb
from tandem.protocol.generated.tandem.v1 import inference_pb2_grpc
from tandem.protocol.messages import RequestRef, Role
from tests.unit.router.conftest import Cluster
from tests.unit.router.fake_cluster import FakeWorker, channel_to, until

ASK = pb.GenerateRequest(
    token_ids=pb.TokenIds(ids=[5, 6, 7, 8]), options=pb.GenerationOptions(max_tokens=1000, ignore_eos=True)
)


async def test_an_abort_is_repeated_until_the_worker_receives_it(cluster: Cluster) -> None:
    cluster.decode.switches.step_s = 0.05
    cluster.decode.switches.silent_aborts = 5
    async with channel_to(cluster.endpoints.grpc_address) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(ASK)
        await anext(aiter(call))
        await until(lambda: cluster.decode.tasks, "it decodes")
        cluster.router._dispatcher.pool.link(cluster.decode.info.peer)._timeout = 0.2
        call.cancel()
        await until(lambda: cluster.decode.aborted, "the decode worker heard it")
    await until(lambda: not cluster.decode.tasks, "and computes no more")


async def test_a_worker_whose_stream_broke_has_given_it_up_itself(cluster: Cluster) -> None:
    cluster.decode.switches.step_s = 0.05
    cluster.decode.switches.silent_aborts = 10**6
    async with channel_to(cluster.endpoints.grpc_address) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(ASK)
        await anext(aiter(call))
        await until(lambda: cluster.decode.tasks, "it decodes")
        link = cluster.router._dispatcher.pool.link(cluster.decode.info.peer)
        link._timeout = 0.2
        call.cancel()
        await until(lambda: link._tasks, "it is told")
        await cluster.decode.kill()
        await until(lambda: not link._tasks, "nobody is told any more")
    cluster.decode.switches.silent_aborts = 0
    await asyncio.sleep(0)


async def test_a_late_grant_of_an_early_attempt_is_released(cluster: Cluster) -> None:
    """Regression: the late grant of the first attempt was never released, and held pages until the lease expired."""
    prefills = [cluster.prefill, await FakeWorker("prefill-1", Role.PREFILL, token="secret").start()]
    await cluster.members(*prefills, cluster.decode)
    decode, dispatcher = cluster.decode, cluster.router._dispatcher
    decode.switches.held_reserves = 1
    dispatcher.pool.link(decode.info.peer)._timeout = 600.0
    ask = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6, 7, 8]), options=pb.GenerationOptions(max_tokens=8))
    async with channel_to(cluster.endpoints.grpc_address) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(ask)
        await until(lambda: decode.reservations, "it is asked for a place")
        chosen = next(iter(dispatcher.live_requests())).prefill_worker
        await next(prefill for prefill in prefills if prefill.worker_id == chosen).drop_streams()
        answer = [message async for message in call]
    assert answer[-1].complete.completion_tokens == 8
    first, second = (reservation.ref for reservation in decode.reservations)
    assert (first.attempt, second.attempt) == (1, 2)
    decode.aborted.clear()
    decode.go.set()
    await until(lambda: not dispatcher._calls, "the first attempt's walk is over")
    await until(lambda: decode.idle, "its place is free", 10)
    assert set(decode.aborted) == {RequestRef(first.request_id, 1)}
