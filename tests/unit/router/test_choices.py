"""Several choices of one request, over gRPC and HTTP."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

import grpc
import openai
import pytest

from router.observability.request_outcome import Outcome
from tandem.metrics import families as f
from tandem.protocol.errors import Internal
from tandem.protocol.generated.tandem.v1 import inference_pb2 as pb
from tandem.protocol.generated.tandem.v1 import types_pb2
from tandem.settings.slo import BEST_EFFORT
from tests.unit.router.conftest import Cluster
from tests.unit.router.fake_cluster import channel_to, until
from tests.unit.router.test_generate import PROMPT, Client, ask, expected

SEED = 2**64 - 1


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[Client]:
    async with channel_to(cluster.endpoints.grpc_address) as channel:
        yield Client(channel)


@pytest.fixture
async def http(cluster: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    base = f"http://{cluster.endpoints.http_address}/v1"
    async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as made:
        yield made


async def by_choice(call: Any) -> tuple[dict[int, list[int]], dict[int, pb.Complete]]:
    tokens: dict[int, list[int]] = defaultdict(list)
    completes: dict[int, pb.Complete] = {}
    async for message in call:
        assert message.index not in completes
        if message.HasField("complete"):
            completes[message.index] = message.complete
        else:
            tokens[message.index].extend(message.chunk.token_ids)
    return tokens, completes


def judged(cluster: Cluster) -> dict[str, float]:
    """Returns the number of requests by outcome."""
    registry = cluster.router._dispatcher.metrics.registry
    counts = {outcome: registry.counter(f.SLO_REQUESTS, BEST_EFFORT.name, outcome).value for outcome in Outcome}
    return {str(outcome): count for outcome, count in counts.items() if count}


async def test_each_answer_has_its_number_its_end_and_a_seed_of_its_own(cluster: Cluster, client: Client) -> None:
    seeds = []
    for _ in range(2):
        tokens, completes = await by_choice(client.stub.Generate(ask(7, n=3, seed=SEED, temperature=1.0)))
        assert tokens == {index: expected(7) for index in range(3)}
        assert {index: completion.completion_tokens for index, completion in completes.items()} == {0: 7, 1: 7, 2: 7}
        seeds.append([prefill.sampling.seed for prefill in cluster.prefill.prefills])
        cluster.prefill.prefills.clear()
    await client.run(ask(7, seed=SEED, temperature=1.0))
    assert sorted(seeds[0]) == sorted(seeds[1]), "who is asked first of the others is chance"
    assert len(set(seeds[0])) == 3
    assert seeds[0][0] == cluster.prefill.prefills[0].sampling.seed == SEED
    await cluster.settled()
    assert judged(cluster) == {"met": 3}


async def test_the_others_wait_until_the_prompt_is_at_the_decode_worker(cluster: Cluster, client: Client) -> None:
    cluster.prefill.switches.silent_prefill = True
    call = client.stub.Generate(ask(7, n=4))
    running = asyncio.create_task(by_choice(call))
    await until(lambda: len(cluster.prefill.prefills) == 1, "the first is placed")
    await asyncio.sleep(0.05)
    assert len(cluster.prefill.prefills) == len(cluster.decode.reservations) == 1
    dispatcher = cluster.router._dispatcher
    assert (dispatcher.waiting, dispatcher.running) == (3, 1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await cluster.settled()
    assert len(cluster.prefill.prefills) == 1


async def test_a_client_that_leaves_ends_all(cluster: Cluster, client: Client) -> None:
    cluster.decode.switches.step_s = 0.01
    call = client.stub.Generate(ask(500, n=3))
    await until(lambda: len(cluster.decode.tasks) == 3, "all three decode")
    call.cancel()
    await cluster.settled()
    assert judged(cluster) == {}


async def test_abort_ends_all_with_their_answers(cluster: Cluster, client: Client) -> None:
    cluster.decode.switches.step_s = 0.01
    asked = ask(500, n=3)
    asked.request_id = "mine"
    running = asyncio.create_task(by_choice(client.stub.Generate(asked)))
    await until(lambda: len(cluster.decode.tasks) == 3, "all three decode")
    assert (await client.stub.Abort(pb.AbortRequest(request_id="mine"))).found
    _, completes = await running
    assert [completion.finish_reason for completion in completes.values()] == [types_pb2.FINISH_REASON_ABORT] * 3


async def test_an_answer_that_fails_fails_the_call(cluster: Cluster, client: Client) -> None:
    cluster.decode.switches.step_s = 0.01
    running = asyncio.create_task(client.error(ask(500, n=3)))
    await until(lambda: len(cluster.decode.tasks) == 3, "all three decode")
    dispatcher = cluster.router._dispatcher
    dispatcher._ends.fail(list(dispatcher._live.values())[1], Internal("this one alone"))
    error = await running
    assert (error.code(), error.details()) == (grpc.StatusCode.INTERNAL, "this one alone")
    await cluster.settled()
    assert judged(cluster) == {"failed": 1}


@pytest.mark.parametrize("n", [0, 17])
async def test_the_number_has_limits(client: Client, n: int) -> None:
    error = await client.error(ask(3, n=n))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "n: " in str(error.details())


class TestSmallQueue:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"max_queued_requests": 4}

    async def test_each_answer_counts(self, cluster: Cluster, client: Client) -> None:
        error = await client.error(ask(3, n=5))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert judged(cluster) == {"rejected": 1}
        cluster.prefill.switches.silent_prefill = True
        calls = [client.stub.Generate(ask(3, n=3)) for _ in range(1)]
        await until(lambda: cluster.router._dispatcher.waiting == 2, "two are held")
        assert (await client.error(ask(3, n=3))).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for call in calls:
            call.cancel()
        await cluster.settled()
        cluster.prefill.switches.silent_prefill = False
        tokens, _ = await by_choice(client.stub.Generate(ask(3, n=4)))
        assert len(tokens) == 4


class TestSmallQueueOfATenant:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"max_queued_per_tenant": 4}

    async def test_each_answer_counts(self, cluster: Cluster, client: Client) -> None:
        """Choices held back for the first one count, too, since they will enter the queue."""
        cluster.prefill.switches.silent_prefill = True
        calls = [client.stub.Generate(ask(3, n=3))]
        await until(lambda: cluster.router._dispatcher.waiting == 2, "two are held")
        error = await asyncio.wait_for(client.error(ask(3, n=3)), 30)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "4 requests with this API key" in str(error.details())
        for call in calls:
            call.cancel()
        await cluster.settled()
        cluster.prefill.switches.silent_prefill = False
        tokens, _ = await by_choice(client.stub.Generate(ask(3, n=4)))
        assert len(tokens) == 4


async def test_openai_counts_the_prompt_once(cluster: Cluster, http: openai.AsyncOpenAI) -> None:
    one = await http.completions.create(model="fake", prompt=PROMPT, max_tokens=6)
    three = await http.completions.create(model="fake", prompt=PROMPT, max_tokens=6, n=3)
    assert [(completion.index, completion.text) for completion in three.choices] == [
        (n, one.choices[0].text) for n in range(3)
    ]
    assert one.usage is not None
    assert three.usage is not None
    assert (three.usage.prompt_tokens, three.usage.completion_tokens) == (one.usage.prompt_tokens, 18)
    chat = await http.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "hi"}], max_tokens=6, n=2, logprobs=True
    )
    assert [choice.index for choice in chat.choices] == [0, 1]
    assert all(choice.logprobs and len(choice.logprobs.content or ()) == 6 for choice in chat.choices)


async def test_openai_streams_name_the_choice(cluster: Cluster, http: openai.AsyncOpenAI) -> None:
    texts: dict[int, str] = defaultdict(str)
    finished: list[int] = []
    usage = None
    stream = await http.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "hi"}], max_tokens=6, n=3, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    async for chunk in stream:
        assert usage is None
        usage = chunk.usage
        for choice in chunk.choices:
            assert choice.index not in finished
            texts[choice.index] += choice.delta.content or ""
            finished += [choice.index] * (choice.finish_reason is not None)
    assert sorted(finished) == [0, 1, 2]
    assert texts[0] == texts[1] == texts[2] != ""
    assert usage is not None
    assert usage.completion_tokens == 18
