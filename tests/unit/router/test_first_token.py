"""The first token of an answer that tolerates no long gap is held until the second."""

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest

from router.requests.first_token import hold_s
from tandem.protocol.cost_parameters import UNMEASURED
from tandem.protocol.ending import failure_event
from tandem.protocol.errors import Internal
from tandem.protocol.messages import RequestEvent, Role
from tandem.settings.slo import BEST_EFFORT, DEFAULT_CLASSES, Overload, SloClass
from tests.unit.router.conftest import WITHOUT_RECOVERY, Cluster
from tests.unit.router.fake_cluster import FakeWorker, channel_to, until
from tests.unit.router.test_generate import Client, ask, expected

SHORT = 40
"""The number of tokens of an answer that tolerates no long gap."""
STRICT = SloClass("strict", ttft_s=2.0, itl_steps=2.0)
PATIENT = SloClass("patient", ttft_s=1e6, itl_steps=2.0)
"""A class whose first token may come at any time."""
SOON = SloClass("soon", ttft_s=0.5, itl_steps=2.0, overload=Overload.DEGRADE)
"""A class whose first token is held for half a second at most."""
ANY = SloClass("any", itl_steps=2.0)
"""A class without a TTFT target."""
COUNT = 6


def test_without_spare_gaps_it_is_held_until_shortly_before_its_target() -> None:
    assert hold_s(STRICT, 0.1, SHORT) == pytest.approx(0.95 * 2.0 - 0.1)
    assert hold_s(STRICT, 1.8, SHORT) == pytest.approx(0.1)
    assert hold_s(STRICT, 1.9, SHORT) == 0.0, "the rest is for its delivery"
    assert hold_s(STRICT, 5.0, SHORT) == 0.0


def test_an_answer_with_a_spare_gap_is_not_held() -> None:
    """Two of 200 gaps may be too long, so the client gets the first token at once."""
    assert hold_s(STRICT, 0.1, 100) > 0.0
    assert hold_s(STRICT, 0.1, 101) == 0.0
    assert hold_s(replace(STRICT, itl_percent=99.9), 0.1, 101) > 0.0


def test_without_a_target_for_the_first_token_it_is_held_until_the_second_comes() -> None:
    assert hold_s(replace(STRICT, ttft_s=math.inf), 100.0, SHORT) == math.inf


def test_nothing_is_held_where_nothing_was_promised_between_tokens() -> None:
    assert hold_s(BEST_EFFORT, 0.0, SHORT) == 0.0
    assert hold_s(SloClass("soon", ttft_s=2.0), 0.0, SHORT) == 0.0
    for tokens in (SHORT, 1000):
        assert hold_s(SloClass("worst", ttft_s=2.0, worst_gap_s=0.1), 0.0, tokens) > 0.0, "no gap may be that long"


@pytest.fixture
def settings() -> dict[str, Any]:
    return {"slo_classes": (*DEFAULT_CLASSES, PATIENT, SOON, ANY), **WITHOUT_RECOVERY}


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[Client]:
    async with channel_to(cluster.endpoints.grpc_address) as channel:
        yield Client(channel)


async def steps_take(cluster: Cluster, seconds: float) -> None:
    """Sets the step time that workers report, and waits until the router knows it."""
    for worker in cluster.workers:
        worker.cost = replace(UNMEASURED, base_s=seconds, observed=1)
        worker.cache([])
    links = cluster.router._dispatcher.pool.links
    await until(lambda: all(link.state.cost.parameters.observed for link in links), "the router heard it")


async def pieces(client: Client, count: int, slo_class: str, received: asyncio.Queue[list[int]]) -> list[int]:
    """Returns the answer's tokens; each chunk's are put into the queue `heard` when it arrives."""
    ids: list[int] = []
    async for message in client.stub.Generate(ask(count, slo_class=slo_class)):
        if message.chunk.token_ids:
            received.put_nowait(list(message.chunk.token_ids))
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
    received: asyncio.Queue[list[int]] = asyncio.Queue()
    answer = asyncio.create_task(pieces(client, COUNT, "patient", received))
    await until(lambda: held(cluster) == 1, "the first token waits")
    assert received.empty()
    cluster.decode.go.set()
    assert await answer == expected(COUNT)
    assert received.get_nowait()[:2] == expected(2)
    assert not held(cluster)


async def test_with_the_second_it_waits_for_no_third(cluster: Cluster, client: Client) -> None:
    """The decode worker's message arrived first."""
    await steps_take(cluster, 100.0)
    cluster.prefill.switches.decode_first = True
    cluster.decode.switches.held_at = 2
    received: asyncio.Queue[list[int]] = asyncio.Queue()
    answer = asyncio.create_task(pieces(client, COUNT, "patient", received))
    async with asyncio.timeout(60.0):
        assert await received.get() == expected(2)
    assert not held(cluster)
    cluster.decode.go.set()
    assert await answer == expected(COUNT)


@pytest.mark.parametrize(
    ("step_s", "slo_class"),
    [(0.001, "soon"), (100.0, "best_effort")],
    ids=["the second does not come in time", "nothing was promised between tokens"],
)
async def test_it_goes_alone(cluster: Cluster, client: Client, step_s: float, slo_class: str) -> None:
    await steps_take(cluster, step_s)
    cluster.decode.switches.held_at = 1
    received: asyncio.Queue[list[int]] = asyncio.Queue()
    answer = asyncio.create_task(pieces(client, COUNT, slo_class, received))
    async with asyncio.timeout(60.0):
        assert await received.get() == expected(1)
    cluster.decode.go.set()
    assert await answer == expected(COUNT)


async def test_without_a_target_it_waits_for_the_second_alone(cluster: Cluster, client: Client) -> None:
    """No timer ends the hold: its delay would be infinite."""
    loop = asyncio.get_running_loop()
    delays: list[float] = []
    later = loop.call_later

    def noted(delay: float, *rest: Any, **more: Any) -> asyncio.TimerHandle:
        delays.append(delay)
        return later(delay, *rest, **more)

    cluster.decode.switches.held_at = 1
    received: asyncio.Queue[list[int]] = asyncio.Queue()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            loop, "call_later", lambda delay, *rest, **more: delays.append(delay) or later(delay, *rest, **more)
        )
        answer = asyncio.create_task(pieces(client, COUNT, "any", received))
        await until(lambda: held(cluster) == 1, "the first token waits")
        assert received.empty()
        cluster.decode.go.set()
        assert await answer == expected(COUNT)
    assert received.get_nowait()[:2] == expected(2)
    assert math.inf not in delays


async def test_an_answer_of_one_token_waits_for_nothing(cluster: Cluster, client: Client) -> None:
    await steps_take(cluster, 100.0)
    assert await pieces(client, 1, "patient", asyncio.Queue()) == expected(1)


async def test_another_attempt_brings_the_second(cluster: Cluster, client: Client) -> None:
    await steps_take(cluster, 100.0)
    cluster.prefill.switches.fail_transfers = 1
    received: asyncio.Queue[list[int]] = asyncio.Queue()
    assert await pieces(client, COUNT, "patient", received) == expected(COUNT)
    assert received.get_nowait()[:2] == expected(2)
    assert not held(cluster)


@pytest.mark.parametrize("end", ["its worker dies", "the router leaves", "another attempt differs"])
async def test_a_request_that_fails_meanwhile_gives_it_before_its_error(
    cluster: Cluster, client: Client, end: str
) -> None:
    await steps_take(cluster, 100.0)
    cluster.decode.switches.held_at = 1
    received: asyncio.Queue[list[int]] = asyncio.Queue()
    answer = asyncio.create_task(pieces(client, COUNT, "patient", received))
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
    assert received.get_nowait() == expected(1)
    assert received.empty()
    assert not held(cluster)
    cluster.decode.go.set()


async def test_tokens_and_the_failure_of_one_message_keep_their_order(cluster: Cluster, client: Client) -> None:
    """Such a message comes from a stream that was slower than the steps."""
    cluster.decode.switches.held_at = 1
    cluster.prefill.switches.silent_prefill = True
    received: asyncio.Queue[list[int]] = asyncio.Queue()
    answer = asyncio.create_task(pieces(client, COUNT, "best_effort", received))
    await until(lambda: bool(cluster.prefill.prefills), "it is placed")
    (request,) = cluster.router._dispatcher._live.values()
    failure = failure_event(request.ref, Internal("the engine is lost"))
    cluster.prefill.send("router-0", RequestEvent(request.ref, 0, tuple(expected(1))), failure)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await answer
    assert error.value.code() is grpc.StatusCode.INTERNAL
    assert received.get_nowait() == expected(1)


@pytest.mark.parametrize("slo_class", ["patient", "any"])
async def test_a_client_that_leaves_meanwhile_leaves_nothing(cluster: Cluster, client: Client, slo_class: str) -> None:
    """The hold may have a timer, or none."""
    await steps_take(cluster, 0.5)
    cluster.decode.switches.held_at = 1
    call = client.stub.Generate(ask(COUNT, slo_class=slo_class))
    await until(lambda: held(cluster) == 1, "the first token waits")
    call.cancel()
    await until(lambda: not held(cluster), "it is forgotten")
    cluster.decode.go.set()
    await until(lambda: cluster.decode.idle, "the workers have let go")
