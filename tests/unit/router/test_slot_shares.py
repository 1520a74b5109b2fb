"""A tenant that finds every slot taken gets some of another tenant's, whose answers continue later."""

import asyncio
import time
from typing import Any

import pytest

from router.requests import slot_shares
from tandem.protocol.generated.tandem.v1 import inference_pb2 as pb
from tests.unit.router.conftest import Cluster
from tests.unit.router.fake_cluster import channel_to, until
from tests.unit.router.test_generate import Client, ask, expected

SLOTS = 6
TOKENS = 250
"""The length of a long answer: more tokens than are given out, one a step, within the tests' timeouts."""
OTHER = [9, 9]
HELD_AT = 20
"""The tokens after which each answer first stands still; enough to be taken back."""


@pytest.fixture
def settings() -> dict[str, Any]:
    return {"api_keys": ("many", "few")}


@pytest.fixture(autouse=True)
async def few_slots(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_shares, "WAIT_S", 0.0)
    cluster.decode.pages_total = 1024
    cluster.decode.max_batch_requests = SLOTS
    cluster.decode.switches.held_at = HELD_AT
    await cluster.members(*cluster.workers)


def running(cluster: Cluster) -> list[int]:
    return [
        request.assembler.count for request in cluster.router._dispatcher._live.values() if request.decode is not None
    ]


async def tokens(client: Client, request: pb.GenerateRequest) -> list[int]:
    """Returns the tokens of all answers to a request, in the order of their arrival."""
    return [token async for message in client.stub.Generate(request) for token in message.chunk.token_ids]


async def fill(cluster: Cluster, client: Client, calls: int, **options: Any) -> list[asyncio.Task[list[int]]]:
    """Returns calls of long answers that take every slot."""
    made = [asyncio.create_task(tokens(client, ask(TOKENS, **options))) for _ in range(calls)]
    await until(lambda: running(cluster) == [HELD_AT] * SLOTS, "every slot is taken")
    return made


async def go_on(cluster: Cluster) -> None:
    """Lets the answers that run have more tokens, and waits until they have come."""
    switches, go, before = cluster.decode.switches, cluster.decode.go, sum(running(cluster))
    assert switches.held_at is not None
    switches.held_at += 1
    cluster.decode.go = asyncio.Event()
    go.set()
    await until(lambda: sum(running(cluster)) != before, "tokens come")


def end(cluster: Cluster) -> None:
    cluster.decode.switches.held_at = None
    cluster.decode.go.set()


@pytest.mark.parametrize("n", [1, 3])
async def test_another_tenant_is_served_while_one_holds_every_slot(cluster: Cluster, n: int) -> None:
    address = cluster.endpoints.grpc_address
    async with asyncio.timeout(60), channel_to(address, "many") as many, channel_to(address, "few") as few:
        calls = await fill(cluster, Client(many), 2 * SLOTS // n, n=n, seed=1)
        for _ in range(3):
            other = asyncio.create_task(tokens(Client(few), ask(4)))
            while not other.done():
                await go_on(cluster)
                await asyncio.wait({other}, timeout=0.3)
            assert other.result() == expected(4)
        assert not any(call.done() for call in calls)
        end(cluster)
        for call in calls:
            assert sorted(await call) == sorted(expected(TOKENS) * n)


async def test_the_second_tenant_gets_its_share_of_slots_only(cluster: Cluster) -> None:
    address = cluster.endpoints.grpc_address
    async with asyncio.timeout(60), channel_to(address, "many") as many, channel_to(address, "few") as few:
        calls = await fill(cluster, Client(many), SLOTS)
        calls += [asyncio.create_task(tokens(Client(few), ask(TOKENS, prompt=OTHER))) for _ in range(SLOTS)]
        live = cluster.router._dispatcher._live

        def share() -> int:
            return sum(
                request.decode is not None and request.token_ids[:2] == tuple(OTHER) for request in live.values()
            )

        async def step() -> None:
            await go_on(cluster)
            cluster.router._dispatcher.swept()

        while share() < 2:
            await step()
        for _ in range(3):
            await step()
        assert share() == 2
        end(cluster)
        for number, call in enumerate(calls):
            assert await call == expected(TOKENS, OTHER if number >= SLOTS else None)


async def test_another_tenant_is_served_while_one_answer_holds_most_pages(cluster: Cluster) -> None:
    address = cluster.endpoints.grpc_address
    cluster.decode.pages_total = TOKENS // cluster.decode.page_tokens + 2  # no second long answer fits
    await cluster.members(*cluster.workers)
    async with asyncio.timeout(60), channel_to(address, "many") as many, channel_to(address, "few") as few:
        long = asyncio.create_task(tokens(Client(many), ask(TOKENS)))
        await until(lambda: running(cluster) == [HELD_AT], "the long answer runs")
        other = asyncio.create_task(tokens(Client(few), ask(64)))
        dispatcher = cluster.router._dispatcher
        await until(
            lambda: any(waiter.queued.yielded for waiter in dispatcher.waiting_requests()), "the long one yields"
        )
        end(cluster)
        assert await other == expected(64)
        assert await long == expected(TOKENS)


async def test_a_tenant_takes_nothing_from_itself(cluster: Cluster) -> None:
    async with asyncio.timeout(60), channel_to(cluster.endpoints.grpc_address, "many") as channel:
        calls = await fill(cluster, Client(channel), SLOTS + 1)
        cluster.router._dispatcher.swept()
        assert not cluster.decode.aborted
        end(cluster)
        await asyncio.gather(*calls)


async def test_an_answer_that_gave_its_slot_away_may_wait_longer_than_new_ones(cluster: Cluster) -> None:
    address = cluster.endpoints.grpc_address
    dispatcher = cluster.router._dispatcher
    async with asyncio.timeout(60), channel_to(address, "many") as many, channel_to(address, "few") as few:
        calls = await fill(cluster, Client(many), SLOTS)
        calls.append(asyncio.create_task(tokens(Client(few), ask(TOKENS, prompt=OTHER))))
        await until(lambda: any(waiter.queued.yielded for waiter in dispatcher.waiting_requests()), "it gave way")
        (waiting,) = (waiter for waiter in dispatcher.waiting_requests() if waiter.queued.yielded)
        waiting.waiting_since -= 2 * cluster.config.queue_timeout_s
        dispatcher._sweeper._sweep(time.monotonic())
        end(cluster)
        for call in calls:
            assert len(await call) == TOKENS


async def test_an_answer_that_a_worker_refuses_to_take_back_does_not_go_before_others(cluster: Cluster) -> None:
    address = cluster.endpoints.grpc_address
    dispatcher = cluster.router._dispatcher
    async with asyncio.timeout(60), channel_to(address, "many") as many, channel_to(address, "few") as few:
        calls = await fill(cluster, Client(many), SLOTS)
        calls.append(asyncio.create_task(tokens(Client(few), ask(TOKENS, prompt=OTHER))))
        await until(lambda: any(waiter.queued.yielded for waiter in dispatcher.waiting_requests()), "it gave way")
        (waiting,) = (waiter for waiter in dispatcher.waiting_requests() if waiter.queued.yielded)
        await until(lambda: running(cluster) == [HELD_AT] * SLOTS, "another tenant's answer has its slot")
        cluster.decode.switches.refuse_reserve = 2
        attempt = waiting.attempt
        end(cluster)
        await until(lambda: waiting.attempt >= attempt + 2, "two attempts were refused")
        assert waiting.queued.yielded
        for call in calls:
            assert len(await call) == TOKENS
