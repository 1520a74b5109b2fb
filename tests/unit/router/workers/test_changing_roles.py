"""Workers change their roles under load, and the cluster its mode: the router loses and duplicates no request."""

import asyncio
from functools import partial

import grpc.aio
import pytest

from tandem.protocol.generated.tandem.v1 import inference_pb2 as pb
from tandem.protocol.generated.tandem.v1 import inference_pb2_grpc
from tandem.protocol.messages import Role
from tandem.protocol.mode import Mode
from tests.unit.router.conftest import Cluster
from tests.unit.router.fake_cluster import FakeWorker, answer_token, until

PROMPT = [5, 6, 7, 8]
RIGHT = [answer_token(PROMPT, index) for index in range(12)]
ASK = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), options=pb.GenerationOptions(max_tokens=len(RIGHT)))


async def run(stub: inference_pb2_grpc.InferenceStub) -> list[int]:
    return [token async for message in stub.Generate(ASK) for token in message.chunk.token_ids]


async def test_refusals_by_the_old_role_are_no_failures(
    cluster: Cluster, stub: inference_pb2_grpc.InferenceStub
) -> None:
    """More rejections than a request has attempts, from either role."""
    most, long_s = cluster.config.max_attempts, cluster.config.queue_timeout_s / 2
    for worker, half in ((cluster.prefill, Role.PREFILL), (cluster.decode, Role.DECODE)):
        worker.switches.closed = frozenset({half})
        calls = worker.prefills if half is Role.PREFILL else worker.reservations
        calls.clear()
        waiting = asyncio.create_task(run(stub))
        await until(lambda calls=calls: len(calls) > 1, "it was refused")  # type: ignore[misc]
        (request,) = cluster.router._dispatcher.live_requests()
        request.waiting_since = since = request.waiting_since - long_s
        await until(lambda calls=calls: len(calls) > most, "it was refused often")  # type: ignore[misc]
        assert request.waiting_since == since, "a refusal does not prolong the longest wait"
        worker.switches.closed = frozenset()
        assert await waiting == RIGHT
        assert cluster.router._dispatcher.waiting == 0
        assert long_s < cluster.prefill.prefills[-1].waited_s < long_s + 30.0, "the worker is told how long it waited"


async def test_what_a_closing_half_gives_up_goes_on_elsewhere(
    cluster: Cluster, stub: inference_pb2_grpc.InferenceStub
) -> None:
    """Each attempt adds two tokens, and none of them counts as a failure.

    An attempt whose end overtakes its first token, which another worker sends, adds none, and is repeated.
    """
    cluster.decode.switches.give_up_after = 2
    assert await run(stub) == RIGHT
    begun = [task.prior_output_tokens for task in cluster.prefill.prefills]
    assert begun == sorted(begun)
    assert set(begun) == {0, 2, 4, 6, 8, 10}


async def test_a_closing_half_gets_nothing_new(cluster: Cluster, stub: inference_pb2_grpc.InferenceStub) -> None:
    old, new = cluster.decode, await FakeWorker("both-0", Role.BOTH, token="secret").start()
    old.switches.step_s = 0.02
    running = asyncio.create_task(run(stub))
    await until(lambda: old.reservations, "it runs")
    old.role, old.closing = Role.BOTH, Role.DECODE
    await cluster.members(cluster.prefill, old, new)
    old.reservations.clear()
    for _ in range(3):
        assert await run(stub) == RIGHT
    assert not old.reservations
    assert len(new.reservations) == 3
    assert await running == RIGHT
    # Its prefill role is open by now, and the others are closed.
    cluster.prefill.closing = new.closing = Role.PREFILL
    await cluster.members(cluster.prefill, old, new)
    assert await run(stub) == RIGHT
    assert len(old.prefills) == 1


async def test_without_a_prefill_or_decode_role_the_router_is_not_ready(
    cluster: Cluster, stub: inference_pb2_grpc.InferenceStub
) -> None:
    cluster.decode.closing = Role.DECODE
    await cluster.controller.set(*cluster.workers)
    await until(lambda: not cluster.router.ready, "the router heard it")
    with pytest.raises(grpc.aio.AioRpcError, match="no decode worker is serving now"):
        await run(stub)
    info = await stub.GetServerInfo(pb.GetServerInfoRequest())
    shown = {worker.worker_id: (worker.closing, worker.draining) for worker in info.workers}
    assert shown[cluster.decode.worker_id] == ("decode", True)
    assert shown[cluster.prefill.worker_id] == ("", False)


async def test_a_worker_that_drains_is_none_to_wait_for(
    cluster: Cluster, stub: inference_pb2_grpc.InferenceStub
) -> None:
    """The mode is disaggregated, and the only worker left that accepts requests has both roles."""
    cluster.controller.mode = Mode.DISAGGREGATED.value
    left, leaving = await FakeWorker("both-0", Role.BOTH, token="secret").start(), cluster.decode
    leaving.switches.held_at = 1
    running = asyncio.create_task(run(stub))
    await until(lambda: leaving.reservations, "it runs")
    leaving.closing = leaving.role
    cluster.workers.append(left)
    cluster.extra.append(left)
    await cluster.controller.set(left, leaving, cluster.prefill)
    cluster.prefill.closing = cluster.prefill.role
    await cluster.controller.set(left, leaving, cluster.prefill)
    await until(lambda: len(cluster.router._dispatcher.pool.views()) == 1, "the router heard it")
    assert await run(stub) == RIGHT
    assert not running.done()
    leaving.go.set()
    assert await running == RIGHT
    assert len(left.prefills) == len(left.reservations) == 1


async def test_the_mode_is_the_controllers(cluster: Cluster, stub: inference_pb2_grpc.InferenceStub) -> None:
    workers = [await FakeWorker(f"both-{n}", Role.BOTH, token="secret").start() for n in range(2)]
    await cluster.members(*workers)
    placement = cluster.router._dispatcher._policy
    for mode in (Mode.COLOCATED, Mode.DISAGGREGATED, Mode.ADAPTIVE, Mode.COLOCATED):
        cluster.controller.mode = mode.value
        await cluster.controller.set(*workers)
        await until(partial(_has_mode, placement, mode), "the router heard it")
        assert await run(stub) == RIGHT
        asked = [(w.prefills[-1].destination, w) for w in workers if w.prefills]
        for worker in workers:
            worker.prefills.clear()
        ((destination, prefilled),) = asked
        assert destination is not None
        if mode is not Mode.ADAPTIVE:
            assert (destination.peer.worker_id == prefilled.worker_id) == (mode is Mode.COLOCATED)
    cluster.controller.mode = "telepathic"
    await cluster.controller.set(*workers)
    assert await run(stub) == RIGHT
    assert _has_mode(placement, Mode.COLOCATED)


async def test_a_request_that_no_worker_of_the_mode_can_serve_does_not_block_others(
    cluster: Cluster, stub: inference_pb2_grpc.InferenceStub
) -> None:
    """Regression: at the queue's head it blocked all others until it had exceeded the queue timeout."""
    small = await FakeWorker("both-0", Role.BOTH, pages_total=4, token="secret").start()
    await cluster.members(cluster.prefill, cluster.decode, small)
    cluster.decode.switches.refuse_reserve = 10**9
    large = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), options=pb.GenerationOptions(max_tokens=80))
    waiting = asyncio.create_task(stub.Generate(large).read())
    await until(lambda: cluster.decode.reservations, "it has tried")
    cluster.controller.mode = Mode.COLOCATED.value
    await cluster.controller.set(*cluster.workers)
    placement = cluster.router._dispatcher._policy
    await until(partial(_has_mode, placement, Mode.COLOCATED), "the router heard it")
    await until(lambda: cluster.router._dispatcher.waiting == 1, "it waits")
    assert await run(stub) == RIGHT
    assert not waiting.done()
    with pytest.raises(grpc.aio.AioRpcError, match="maximum context length is 33 tokens"):
        await stub.Generate(large).read()
    cluster.decode.switches.refuse_reserve = 0
    cluster.controller.mode = Mode.DISAGGREGATED.value
    await cluster.controller.set(*cluster.workers)
    await waiting


def _has_mode(placement: object, mode: Mode) -> bool:
    return bool(placement.mode is mode)  # type: ignore[attr-defined]
