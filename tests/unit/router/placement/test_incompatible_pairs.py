"""A rolling update: workers of two releases refuse each other, and requests go where both are of one."""

import asyncio

import grpc.aio
import pytest

from router.placement.fleet import REMEMBERED_S, IncompatiblePairs
from tandem.capacity.simulation.clock import VirtualClock
from tandem.net.rpc import RETRY_AFTER
from tandem.protocol.generated.tandem.v1 import inference_pb2 as pb
from tandem.protocol.generated.tandem.v1 import inference_pb2_grpc
from tandem.protocol.messages import PeerRef, Role
from tests.unit.router.conftest import Cluster
from tests.unit.router.fake_cluster import FakeWorker, answer_token, until

PROMPT = [5, 6, 7, 8]
ASK = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), options=pb.GenerationOptions(max_tokens=6))
ANSWER = [answer_token(PROMPT, index) for index in range(6)]
P, D = PeerRef("p", 1), PeerRef("d", 1)


async def run(stub: inference_pb2_grpc.InferenceStub) -> list[int]:
    return await _tokens(stub, ASK)


async def error(stub: inference_pb2_grpc.InferenceStub) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await run(stub)
    return caught.value


async def test_a_pair_that_does_not_fit_is_tried_once_and_ends_no_request(
    cluster: Cluster, stub: inference_pb2_grpc.InferenceStub
) -> None:
    old = cluster.decode
    fits = await FakeWorker("decode-1", Role.DECODE, token="secret").start()
    await cluster.members(cluster.prefill, old, fits)
    cluster.prefill.switches.incompatible = frozenset({old.worker_id})
    for _ in range(8):
        assert await run(stub) == ANSWER
    asked = [task.destination.peer.worker_id for task in cluster.prefill.prefills if task.destination is not None]
    assert asked.count(old.worker_id) == 1
    assert asked.count("decode-1") == 8


async def test_without_a_compatible_pair_the_client_gets_the_reason_until_a_new_worker_fits(
    cluster: Cluster, stub: inference_pb2_grpc.InferenceStub
) -> None:
    cluster.prefill.switches.incompatible = frozenset({"decode-0"})
    first = await error(stub)
    assert first.code() is grpc.StatusCode.UNAVAILABLE
    assert "no prefill worker fits a decode worker; transfer protocol: decode-0 speaks another" in first.details()
    assert RETRY_AFTER in dict(first.trailing_metadata() or ())
    assert not cluster.router.ready
    assert (await error(stub)).details() == first.details()
    assert len(cluster.prefill.prefills) == 1, "the second was turned away on arrival"

    updated = await FakeWorker("decode-0", Role.DECODE, incarnation=2, token="secret").start()
    cluster.prefill.switches.incompatible = frozenset()
    await cluster.members(cluster.prefill, updated)
    await until(lambda: cluster.router.ready, "what is known of a run is forgotten with it")
    assert await run(stub) == ANSWER


async def test_many_pairs_that_do_not_fit_use_up_the_tries_of_a_request(
    cluster: Cluster, stub: inference_pb2_grpc.InferenceStub
) -> None:
    others = [await FakeWorker(f"decode-{number}", Role.DECODE, token="secret").start() for number in range(1, 5)]
    await cluster.members(cluster.prefill, cluster.decode, *others)
    cluster.prefill.switches.incompatible = frozenset({"decode-0", *(other.worker_id for other in others[:-1])})
    failed = await error(stub)
    assert failed.code() is grpc.StatusCode.UNAVAILABLE
    assert "are incompatible; transfer protocol" in failed.details()
    assert len(cluster.prefill.prefills) == cluster.config.max_attempts
    assert await run(stub) == ANSWER


def test_a_pair_is_forgotten_in_time_and_another_run_is_another_pair() -> None:
    clock = VirtualClock(1000.0)
    incompatible = IncompatiblePairs(clock)
    incompatible.learn(P, D, "because")
    assert not incompatible.fit(P, D)
    assert not incompatible.forget_old()
    assert incompatible.fit(P, PeerRef("d", 2))
    assert incompatible.why([P], [D]) == "because"
    clock.now += REMEMBERED_S
    assert incompatible.forget_old()
    assert incompatible.fit(P, D)
    assert not incompatible
    assert not incompatible.forget_old()


async def test_a_request_that_waits_for_compatible_workers_blocks_none_and_waits_until_the_refusal_expires(
    cluster: Cluster, stub: inference_pb2_grpc.InferenceStub
) -> None:
    """The only two that are large enough for it have refused each other; others fit."""
    large = cluster.decode
    small = await FakeWorker("decode-1", Role.DECODE, pages_total=4, token="secret").start()
    await cluster.members(cluster.prefill, large, small)
    dispatcher = cluster.router._dispatcher
    incompatible, clock = dispatcher.pool.fleet.incompatible, VirtualClock(1000.0)
    incompatible._clock = clock
    await until(lambda: len(dispatcher.pool.views()) == 3, "all are live")
    peers = {books.peer.worker_id: books.peer for books in dispatcher.pool.views()}
    prefill, decode = peers[cluster.prefill.worker_id], peers[large.worker_id]
    incompatible.learn(prefill, decode, "other releases")
    long = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), options=pb.GenerationOptions(max_tokens=200))
    waiting = asyncio.ensure_future(_tokens(stub, long))
    await until(lambda: dispatcher.waiting == 1, "it waits")
    for _ in range(2):
        assert await asyncio.wait_for(run(stub), 60) == ANSWER
    assert dispatcher.waiting == 1
    clock.now += REMEMBERED_S
    assert len(await asyncio.wait_for(waiting, 60)) == 200


async def _tokens(stub: inference_pb2_grpc.InferenceStub, request: pb.GenerateRequest) -> list[int]:
    return [token async for message in stub.Generate(request) for token in message.chunk.token_ids]
