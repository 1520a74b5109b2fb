"""A first token that would be alone for longer than its class bears goes with the second."""

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest

from router.first_token import gap_s, held_until_s, hold_s
from router.placed_work import AnswerWork, PromptWork
from router.placement import Forecast
from router.slo import BEST_EFFORT, DEFAULT_CLASSES, SloClass
from router.step_forecast import AnswerForecast, AskedAnswer
from tests.unit.router.conftest import Cluster
from tests.unit.router.fake_cluster import FakeWorker, channel_to, until
from tests.unit.router.fleets import TestFleet
from tests.unit.router.test_generate import Client, ask, expected
from wire.cost_parameters import UNMEASURED
from wire.ending import failure_event
from wire.errors import Internal
from wire.messages import Duty, RequestEvent, Role
from wire.policy_name import PolicyName

STRICT = SloClass("strict", ttft_s=2.0, itl_steps=2.0)
PATIENT = SloClass("patient", ttft_s=1e6, itl_steps=2.0)
"""Whose first token may come whenever it does."""
LATE = SloClass("late", ttft_s=10.0, itl_s=9.0)
"""Whose first token has no time to wait for the second."""
COUNT = 6


def test_it_waits_where_the_first_gap_is_longer_than_a_gap_may_be() -> None:
    assert hold_s(STRICT, 0.010, 0.015, 0.1) == pytest.approx(0.120)
    assert hold_s(STRICT, 0.015, 0.015, 0.1) == 0.0
    assert hold_s(replace(STRICT, worst_gap_s=0.012), 0.020, 0.015, 0.1) == pytest.approx(0.120)


def test_it_waits_no_longer_than_there_is_time() -> None:
    assert hold_s(STRICT, 0.010, 0.015, 1.85) == pytest.approx(0.050), "until a tenth of a second before its target"
    assert hold_s(STRICT, 0.010, 0.015, 1.88) == 0.0, "less than twice the gap"
    quick = SloClass("quick", ttft_s=0.3, itl_s=0.010)
    assert hold_s(quick, 0.010, 0.015, 0.2) == pytest.approx(0.040), "or a fifth of it"


def test_the_first_gap_is_three_steps_with_a_handover_and_two_without() -> None:
    """As long as they are now; where the worker keeps them short, no longer than that."""
    worker = TestFleet().add("w", Role.BOTH, duty=Duty(Role.BOTH, PolicyName.DECODE_PRIORITY), max_step_tokens=2048)
    forecast = Forecast(0.1, 0.1, 0.005, 0, 100, 1, 0.005, 0.0)
    assert gap_s(forecast, worker, local=True) == pytest.approx(0.010)
    assert gap_s(forecast, worker, local=False) == pytest.approx(0.015)
    worker.book_prefill("another", PromptWork(1000))
    busy_s = worker.queue[2]
    assert busy_s > 0.015
    assert gap_s(forecast, worker, local=True) == 2 * busy_s
    assert gap_s(forecast._replace(first_gap_s=0.025), worker, local=True) == 0.025
    assert gap_s(forecast._replace(first_gap_s=0.025), worker, local=False) == 3 * busy_s
    assert gap_s(forecast._replace(first_gap_s=0.009), worker, local=True) == 2 * busy_s, "decoding alone breaks it"
    worker.change(replace(worker.info, duty=Duty(Role.BOTH)))
    shared_s = worker.queue[2]
    assert gap_s(forecast._replace(first_gap_s=0.025), worker, local=True) == 2 * shared_s > 0.025, "nobody keeps it"


def test_what_comes_soon_enough_to_be_held_is_held() -> None:
    """Placement counts on it, and the worker is told nothing: with steps as long as the target, at most."""
    until_s = held_until_s(STRICT, 0.010, 0.3)
    assert hold_s(STRICT, 0.010, 2 * 0.010, 0.3 + until_s - 1e-6) > 0.0


@pytest.mark.parametrize("policy", [PolicyName.DECODE_PRIORITY, PolicyName.UNCHUNKED])
def test_placement_counts_on_no_more_than_is_held(policy: PolicyName) -> None:
    """Where nothing keeps steps within a target, they take what waiting prompts make of them: here 45 ms."""
    worker = TestFleet().add("w", Role.BOTH, duty=Duty(Role.BOTH, policy), max_step_tokens=2048)
    slo = SloClass("balanced", ttft_s=1.0, itl_s=0.025)
    worker.book_decode("another", AnswerWork(4, 64, slo, 0))
    worker.book_prefill("another's", PromptWork(2047))
    answer = AnswerForecast(worker, 0, AskedAnswer(1000, 40.0, slo, 0, waited_s=0.1))
    forecast = Forecast(0.1, 0.1, answer.step_s, 0, 100, 1, 0.005, 0.0)
    expected_s = gap_s(forecast, worker, local=True)
    assert expected_s > slo.itl_s
    assert hold_s(slo, slo.itl_s, expected_s, 0.1 + answer.held_until_s - 1e-6) > 0.0


def test_it_waits_for_nobody_who_was_promised_nothing_between_tokens() -> None:
    assert hold_s(BEST_EFFORT, math.inf, 0.005, 0.0) == 0.0
    assert hold_s(SloClass("soon", ttft_s=2.0), math.inf, 0.005, 0.0) == 0.0


@pytest.fixture
def settings() -> dict[str, Any]:
    return {"slo_classes": (*DEFAULT_CLASSES, PATIENT, LATE)}


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[Client]:
    async with channel_to(cluster.endpoints.grpc_address) as channel:
        yield Client(channel)


async def steps_take(cluster: Cluster, seconds: float) -> None:
    """By what the workers say."""
    for worker in cluster.workers:
        worker.cost = replace(UNMEASURED, base_s=seconds, observed=1)
        worker.cache([])
    links = cluster.router._dispatcher.pool.links
    await until(lambda: all(link.books.cost.parameters.observed for link in links), "the router heard it")


async def pieces(client: Client, count: int, slo_class: str, heard: asyncio.Queue[list[int]]) -> list[int]:
    """The answer's tokens; each chunk's are `heard` when it comes."""
    ids: list[int] = []
    async for message in client.stub.Generate(ask(count, slo_class=slo_class)):
        if message.chunk.token_ids:
            heard.put_nowait(list(message.chunk.token_ids))
            ids += message.chunk.token_ids
    return ids


def held(cluster: Cluster) -> int:
    return len(cluster.router._dispatcher._events._held)


@pytest.mark.parametrize("workers", [2, 1], ids=["handed over", "local"])
async def test_it_goes_with_the_second(cluster: Cluster, client: Client, workers: int) -> None:
    if workers == 1:
        await cluster.members(await FakeWorker("both-0", Role.BOTH, token="secret").start())
    await steps_take(cluster, 100.0)
    cluster.decode.switches.held_at = 1
    heard: asyncio.Queue[list[int]] = asyncio.Queue()
    answer = asyncio.create_task(pieces(client, COUNT, "patient", heard))
    await until(lambda: held(cluster) == 1, "the first token waits")
    assert heard.empty()
    cluster.decode.go.set()
    assert await answer == expected(COUNT)
    assert heard.get_nowait()[:2] == expected(2)
    assert not held(cluster)


async def test_with_the_second_it_waits_for_no_third(cluster: Cluster, client: Client) -> None:
    """The decode worker's word came first."""
    await steps_take(cluster, 100.0)
    cluster.prefill.switches.decode_first = True
    cluster.decode.switches.held_at = 2
    heard: asyncio.Queue[list[int]] = asyncio.Queue()
    answer = asyncio.create_task(pieces(client, COUNT, "patient", heard))
    async with asyncio.timeout(60.0):
        assert await heard.get() == expected(2)
    assert not held(cluster)
    cluster.decode.go.set()
    assert await answer == expected(COUNT)


@pytest.mark.parametrize(
    ("step_s", "slo_class"),
    [(0.001, "patient"), (100.0, "best_effort")],
    ids=["the second does not come in time", "nothing was promised between tokens"],
)
async def test_it_goes_alone(cluster: Cluster, client: Client, step_s: float, slo_class: str) -> None:
    await steps_take(cluster, step_s)
    cluster.decode.switches.held_at = 1
    heard: asyncio.Queue[list[int]] = asyncio.Queue()
    answer = asyncio.create_task(pieces(client, COUNT, slo_class, heard))
    async with asyncio.timeout(60.0):
        assert await heard.get() == expected(1)
    cluster.decode.go.set()
    assert await answer == expected(COUNT)


@pytest.mark.parametrize(("slo_class", "bears_s"), [("late", LATE.itl_s), ("patient", math.inf)])
async def test_who_computes_the_prompt_hears_what_the_first_gap_may_be(
    cluster: Cluster, client: Client, slo_class: str, bears_s: float
) -> None:
    await steps_take(cluster, 0.001)
    assert await pieces(client, COUNT, slo_class, asyncio.Queue()) == expected(COUNT)
    assert [task.first_gap_s for task in cluster.prefill.prefills] == [bears_s]


async def test_an_answer_of_one_token_waits_for_nothing(cluster: Cluster, client: Client) -> None:
    await steps_take(cluster, 100.0)
    assert await pieces(client, 1, "patient", asyncio.Queue()) == expected(1)


async def test_another_attempt_brings_the_second(cluster: Cluster, client: Client) -> None:
    await steps_take(cluster, 100.0)
    cluster.prefill.switches.fail_transfers = 1
    heard: asyncio.Queue[list[int]] = asyncio.Queue()
    assert await pieces(client, COUNT, "patient", heard) == expected(COUNT)
    assert heard.get_nowait()[:2] == expected(2)
    assert not held(cluster)


@pytest.mark.parametrize("end", ["its worker dies", "the router leaves", "another attempt differs"])
async def test_a_request_that_fails_meanwhile_gives_it_before_its_error(
    cluster: Cluster, client: Client, end: str
) -> None:
    await steps_take(cluster, 100.0)
    cluster.decode.switches.held_at = 1
    heard: asyncio.Queue[list[int]] = asyncio.Queue()
    answer = asyncio.create_task(pieces(client, COUNT, "patient", heard))
    await until(lambda: held(cluster) == 1, "the first token waits")
    (request,) = cluster.router._dispatcher._live.values()
    match end:
        case "its worker dies":
            await cluster.decode.kill()
        case "the router leaves":
            await cluster.router._dispatcher.drain(0.0)
        case _:
            cluster.decode.send("router-0", RequestEvent(request.ref, 0, (1,)))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await answer
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert heard.get_nowait() == expected(1)
    assert heard.empty()
    assert not held(cluster)
    cluster.decode.go.set()


async def test_tokens_and_the_failure_of_one_message_keep_their_order(cluster: Cluster, client: Client) -> None:
    """Of a stream that was slower than the steps."""
    cluster.decode.switches.held_at = 1
    cluster.prefill.switches.silent_prefill = True
    heard: asyncio.Queue[list[int]] = asyncio.Queue()
    answer = asyncio.create_task(pieces(client, COUNT, "best_effort", heard))
    await until(lambda: bool(cluster.prefill.prefills), "it is placed")
    (request,) = cluster.router._dispatcher._live.values()
    failure = failure_event(request.ref, Internal("the engine is lost"))
    cluster.prefill.send("router-0", RequestEvent(request.ref, 0, tuple(expected(1))), failure)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await answer
    assert error.value.code() is grpc.StatusCode.INTERNAL
    assert heard.get_nowait() == expected(1)


async def test_a_client_that_leaves_meanwhile_leaves_nothing(cluster: Cluster, client: Client) -> None:
    await steps_take(cluster, 0.5)
    cluster.decode.switches.held_at = 1
    call = client.stub.Generate(ask(COUNT, slo_class="patient"))
    await until(lambda: held(cluster) == 1, "the first token waits")
    call.cancel()
    await until(lambda: not held(cluster), "its time is over")
    cluster.decode.go.set()
    await until(lambda: cluster.decode.idle, "the workers have let go")
