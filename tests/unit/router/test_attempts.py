"""An earlier attempt does not affect the current one; both workers of an attempt are notified of its end."""

import asyncio
from typing import Any

import pytest

from tandem.protocol.ending import failure_event
from tandem.protocol.errors import TransferFailed
from tandem.protocol.messages import FinishReason, Lease, RequestEvent, RequestRef, StepTokens
from tests.unit.router.conftest import Cluster
from tests.unit.router.fake_cluster import channel_to, until
from tests.unit.router.test_generate import PROMPT, Client, ask, expected, placed, silence


@pytest.fixture
async def client(cluster: Cluster) -> Any:
    async with channel_to(cluster.endpoints.grpc_address) as channel:
        yield Client(channel)


async def second_attempt(cluster: Cluster) -> tuple[RequestRef, RequestRef]:
    """Returns both attempts of the only request: the first one timed out, and the second has no event yet."""
    cluster.prefill.switches.silent_prefill = True
    for attempts in (1, 2):
        await placed(cluster, attempts)
        if attempts == 1:
            silence(cluster)
    first, second = (task.ref for task in cluster.prefill.prefills)
    assert second == RequestRef(first.request_id, first.attempt + 1)
    return first, second


async def answer(cluster: Cluster, client: Client, second: RequestRef, running: asyncio.Task[Any]) -> None:
    """Sends the whole answer for the second attempt, and checks it."""
    whole = RequestEvent(second, 0, tuple(expected(4)), FinishReason.LENGTH)
    cluster.prefill.send("router-0", whole)
    _, ids, _ = await running
    assert ids == expected(4)
    assert len(cluster.prefill.prefills) == 2, "no third attempt"
    for worker in cluster.workers:
        worker.forget()


async def test_events_of_an_earlier_attempt_are_dropped(cluster: Cluster, client: Client) -> None:
    """The failure of the first attempt must not start a third, nor its token become part of the answer."""
    running = asyncio.create_task(client.run(ask(4)))
    first, second = await second_attempt(cluster)
    failed = failure_event(first, TransferFailed("the pages did not arrive"))
    cluster.prefill.send("router-0", RequestEvent(first, 0, (expected(1)[0] + 1,)), failed)
    await answer(cluster, client, second, running)


async def test_tokens_in_columns_of_an_earlier_attempt_are_dropped(cluster: Cluster, client: Client) -> None:
    running = asyncio.create_task(client.run(ask(4)))
    first, second = await second_attempt(cluster)
    request_id, right = first.request_id, expected(4)
    wrong = StepTokens([request_id], [first.attempt], [0], [right[0] + 1])
    cluster.prefill.send("router-0", tokens=(wrong,))
    cluster.prefill.send("router-0", tokens=(StepTokens([request_id], [second.attempt], [0], [right[0]]),))
    # Now an answer waits for its next token, which is the path of most tokens.
    late = StepTokens([request_id, request_id], [first.attempt, second.attempt], [1, 1], [right[1] + 1, right[1]])
    cluster.prefill.send("router-0", tokens=(late,))
    await answer(cluster, client, second, running)


async def test_an_earlier_attempts_lease_may_be_lost(cluster: Cluster, client: Client) -> None:
    running = asyncio.create_task(client.run(ask(4)))
    first, second = await second_attempt(cluster)
    dispatcher = cluster.router._dispatcher
    lease = cluster.prefill.prefills[0].destination.lease  # type: ignore[union-attr]
    assert lease == Lease(first.request_id, first.attempt, lease.epoch)
    dispatcher.on_lease_lost(dispatcher.pool.link(cluster.decode.info.peer), lease)
    await answer(cluster, client, second, running)


async def test_both_workers_are_notified_when_a_client_leaves(cluster: Cluster, client: Client) -> None:
    """The prefill worker has the prompt; without the abort it would compute it and write to a lease that is gone."""
    cluster.prefill.switches.silent_prefill = True
    call = client.stub.Generate(ask(8, PROMPT))
    await placed(cluster, 1)
    call.cancel()
    (task,) = cluster.prefill.prefills
    await until(lambda: cluster.prefill.aborted == cluster.decode.aborted == [task.ref], "both were told")
