"""Requests that are preempted at their decode worker: their streams continue, in whichever order events arrive."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from router.config import RouterConfig
from router.placement.policy import PlacementPolicy
from router.placement.queue import QueuedRequest, RequestQueue
from router.placement.scheduler import RequestScheduler, record
from tandem.cost_model.answer_length import SEEN_MIN
from tandem.protocol.generated.tandem.v1 import types_pb2
from tandem.protocol.messages import Role
from tandem.settings.model import ModelSettings
from tests.unit.router.conftest import Cluster
from tests.unit.router.fake_cluster import FakeWorker, answer_logprobs, channel_to, until
from tests.unit.router.fleets import TestFleet
from tests.unit.router.placement.test_queue import drained, filled, queued
from tests.unit.router.test_generate import Client, ask, expected


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[Client]:
    async with channel_to(cluster.endpoints.grpc_address) as channel:
        yield Client(channel)


@pytest.mark.parametrize("decode_first", [False, True])
@pytest.mark.parametrize("brought", [0, 1, 4])
async def test_the_stream_has_every_token_once(
    cluster: Cluster, client: Client, brought: int, decode_first: bool
) -> None:
    """The request is preempted more often than it may fail; the prefill worker's token may arrive after that."""
    cluster.decode.switches.preempt_after = brought
    cluster.prefill.switches.decode_first = decode_first
    count = 12
    call = client.stub.Generate(ask(count, logprobs=2))
    messages = [message async for message in call]
    complete = messages[-1].complete
    ids = [token for message in messages for token in message.chunk.token_ids]
    scores = [score for message in messages for score in message.chunk.logprobs]
    assert ids == expected(count)
    assert [score.chosen.logprob for score in scores] == [answer_logprobs(token, 2)[0].chosen for token in ids]
    assert complete.completion_tokens == count
    starts = list(range(0, count, 1 + brought))
    assert [task.prior_output_tokens for task in cluster.prefill.prefills] == starts
    events = [stamp.event for stamp in complete.timeline.event_times]
    assert events.count(types_pb2.LIFECYCLE_EVENT_PREEMPTED) == len(cluster.decode.reservations) - (
        count - starts[-1] > 1
    )


async def test_a_client_may_leave_while_it_waits_to_go_on(cluster: Cluster, client: Client) -> None:
    cluster.decode.switches.preempt_after = 1
    call = client.stub.Generate(ask(30))
    async for message in call:
        if message.chunk.token_ids:
            cluster.decode.not_ready = "not now"
            await cluster.controller.set(*cluster.workers)
            break
    await until(lambda: cluster.router._dispatcher.waiting == 1, "it waits")
    call.cancel()
    cluster.decode.not_ready = ""
    await cluster.members(*cluster.workers)
    await asyncio.sleep(0)


async def test_its_wait_begins_when_it_gives_way(cluster: Cluster, client: Client) -> None:
    """The time since the request's arrival does not count."""
    cluster.decode.switches.preempt_after = 2
    cluster.decode.switches.held_at = 1
    dispatcher = cluster.router._dispatcher
    running = asyncio.create_task(client.run(ask(6)))
    await until(
        lambda: [live_request.assembler.count for live_request in dispatcher._live.values()] == [1], "it decodes"
    )
    (request,) = dispatcher._live.values()
    request.waiting_since -= 2 * cluster.config.queue_timeout_s
    cluster.decode.not_ready = "not now"
    await cluster.controller.set(*cluster.workers)
    await until(lambda: not dispatcher.pool.ready, "nobody takes it back")
    cluster.decode.go.set()
    await until(lambda: dispatcher.waiting == 1, "it waits")
    dispatcher._sweeper._sweep(dispatcher._sweeper._clock())
    cluster.decode.not_ready = ""
    await cluster.members(*cluster.workers)
    _, ids, _ = await running
    assert ids == expected(6)


def test_who_reads_already_goes_before_all_others() -> None:
    resumed = queued("resumed", 3, 9.0, tenant="greedy", priority=1)
    later = queued("later", 4, 9.0)
    resumed.resumed = later.resumed = True
    queue = filled(RequestQueue(), queued("new", 1, 1.0, priority=-5), later, resumed)
    queue.charge("greedy", 1e9)
    assert (len(queue), len(queue._tenants)) == (3, 1)
    assert drained(queue) == ["resumed", "later", "new"]
    queue.push(resumed)
    queue.remove(resumed)
    assert queue.head() is None
    assert len(queue) == 0


async def test_others_pass_one_that_only_a_dead_worker_could_serve(cluster: Cluster, client: Client) -> None:
    """The request already streams, so it is ahead of the others in the queue."""
    large = cluster.decode
    large.switches.mute_after = 3
    running = asyncio.create_task(client.run(ask(200)))
    dispatcher = cluster.router._dispatcher
    await until(lambda: [request.assembler.count for request in dispatcher._live.values()] == [3], "it reads")
    small = await FakeWorker("decode-1", Role.DECODE, pages_total=4, token="secret").start()
    await cluster.members(cluster.prefill, large, small)
    await large.kill()
    await until(lambda: dispatcher.waiting == 1, "it waits")
    for _ in range(2):
        _, ids, _ = await asyncio.wait_for(client.run(ask(6)), 60)
        assert ids == expected(6)
    assert dispatcher.waiting == 1
    heir = await FakeWorker("decode-2", Role.DECODE, token="secret").start()
    await cluster.members(cluster.prefill, small, heir)
    _, ids, _ = await running
    assert ids == expected(200)


def test_a_skipped_request_waits_on_without_a_turn() -> None:
    hopeless, back, other = queued("hopeless", 1, 1.0), queued("back", 2, 9.0), queued("other", 3, 5.0)
    back.resumed = True
    queue = filled(RequestQueue(), hopeless, back, other)
    queue.skip(back)
    queue.skip(hopeless)
    assert len(queue) == 3
    assert queue.head() is other
    assert {request.internal_id for request in queue} == {"hopeless", "back", "other"}
    queue.remove(other)
    assert queue.head() is None
    queue.restore_skipped()
    assert queue.head() is back
    queue.skip(back)
    queue.remove(back)
    queue.restore_skipped()
    assert drained(queue) == ["hopeless"]


def test_a_worker_is_given_what_it_is_expected_to_have_room_for() -> None:
    """The worker has 64 pages of 16 tokens; an answer may have 400 tokens, and earlier ones had 20."""
    at = TestFleet()
    prefill = at.add("p", Role.PREFILL)
    decode = at.add("d", Role.DECODE, max_batch_requests=64)
    config = RouterConfig("r", ModelSettings(Path(), ("m",)), "")
    scheduler = RequestScheduler(config, PlacementPolicy(), at.fleet, at.clock)

    def placed(count: int) -> int:
        before = len(decode.request_ids)
        for number in range(count):
            new = QueuedRequest(f"{before}-{number}", number, at.clock.now, 100, 400)
            scheduler.enter(new)
            if (pair := scheduler.bind(new)) is not None:
                record(new, pair, prefill, decode)
                prefill.remove_prompt(new.internal_id)
            scheduler.queue.remove(new)
        return len(decode.request_ids) - before

    assert placed(3) == 2
    for name in list(decode.request_ids):
        decode.remove_answer(name)
    ended = QueuedRequest("ended", 0, 0.0, 100, 400)
    for _ in range(SEEN_MIN):
        scheduler.ended(ended, 20)
    assert placed(20) == 64 // 8
    assert scheduler.bind(QueuedRequest("never", 99, 0.0, 100, 1000)) is None
