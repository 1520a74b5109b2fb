"""A controller that does not lead mirrors the leader's membership and forwards calls to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from tandem.cli.connection.controller_client import ControllerClient
from tandem.cluster.leadership import forwarding as elsewhere
from tandem.cluster.leadership.forwarding import ForwardingServicer, mirror
from tandem.cluster.supervision.registry import Registry
from tandem.net.rpc import listen, open_channel, open_server
from tandem.protocol import conversion
from tandem.protocol.errors import InvalidArgument, NotFound, TandemError, Unavailable
from tandem.protocol.generated.tandem.v1 import cluster_pb2, cluster_pb2_grpc
from tandem.protocol.messages import Membership, PeerRef, Role, WorkerInfo
from tests.unit.cluster.crew import FACTS, until
from tests.unit.cluster.test_service import ABSENT, Asked, AskedAdapters, asked_metrics


class Nobody(Asked):
    """An operator that must not be called."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(name)


class NoAdapters(AskedAdapters):
    """The adapters of a controller that must not be asked for them."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(name)


async def no_metrics() -> str:
    raise AssertionError("this controller must not be asked for metrics")


class Listeners:
    def __init__(self) -> None:
        self.servers: list[Any] = []
        self.registry = Registry()
        self.registry.keep(())
        self.supervisor = ""
        self.clear = asyncio.Event()

    async def open(self, operator: Asked, where: Callable[[], Awaitable[str]]) -> str:
        server = open_server()
        adapters = AskedAdapters() if type(operator) is Asked else NoAdapters()
        metrics = asked_metrics if type(operator) is Asked else no_metrics
        servicer = ForwardingServicer(self.registry, operator, adapters, metrics, token="secret", elsewhere=where)
        cluster_pb2_grpc.add_ClusterServicer_to_server(servicer, server)
        port = listen(server, "127.0.0.1:0", "secret")
        await server.start()
        self.servers.append(server)
        return f"127.0.0.1:{port}"

    async def here(self) -> str:
        return ""

    async def there(self) -> str:
        await self.clear.wait()
        return self.supervisor


@pytest.fixture
async def listeners() -> AsyncIterator[Listeners]:
    made = Listeners()
    yield made
    for server in made.servers:
        await server.stop(None)


def asks(client: ControllerClient) -> list[Awaitable[Any]]:
    return [
        client.set_mode("colocated"),
        client.resize(workers=3),
        client.drain_worker("w", grace_s=2.0, restart=True),
        client.load_adapter("sql", "/adapters/sql"),
        client.unload_adapter("sql"),
    ]


async def failures(client: ControllerClient) -> list[TandemError]:
    errors = []
    for ask in asks(client):
        with pytest.raises(TandemError) as failure:
            await ask
        errors.append(failure.value)
    return errors


async def test_requests_of_operators_reach_the_supervising_controller_unchanged(listeners: Listeners) -> None:
    listeners.supervisor = await listeners.open(Asked(), listeners.here)
    asked_there = await failures(ControllerClient(listeners.supervisor, "secret"))
    listeners.clear.set()
    client = ControllerClient(await listeners.open(Nobody(), listeners.there), "secret")
    asked_here = await failures(client)
    assert [type(error) for error in asked_here] == [
        InvalidArgument,
        InvalidArgument,
        NotFound,
        InvalidArgument,
        NotFound,
    ]
    for here, there in zip(asked_here, asked_there, strict=True):
        assert there.message.removeprefix("the controller: ") in here.message
    assert await client.absent() == (ABSENT,)


async def test_routers_get_the_metrics_of_the_supervising_controller(listeners: Listeners) -> None:
    listeners.supervisor = await listeners.open(Asked(), listeners.here)
    listeners.clear.set()
    async with open_channel(await listeners.open(Nobody(), listeners.there), "secret") as channel:
        reply = await cluster_pb2_grpc.ClusterStub(channel).GetMetrics(cluster_pb2.GetMetricsRequest())
    assert reply.text == "the metrics"


async def test_operators_wait_until_the_supervising_controller_is_known(listeners: Listeners) -> None:
    listeners.supervisor = await listeners.open(Asked(), listeners.here)
    client = ControllerClient(await listeners.open(Nobody(), listeners.there), "secret")
    asking = asyncio.ensure_future(client.absent())
    await asyncio.sleep(0.02)
    assert not asking.done()
    listeners.clear.set()
    assert await asking == (ABSENT,)


async def test_a_controller_that_does_not_answer_is_named(listeners: Listeners) -> None:
    listeners.supervisor = "127.0.0.1:1"
    listeners.clear.set()
    client = ControllerClient(await listeners.open(Nobody(), listeners.there), "secret")
    with pytest.raises(Unavailable, match=r"the controller at 127\.0\.0\.1:1"):
        await client.resize(workers=3)


async def test_its_membership_is_the_others_word_for_word(
    listeners: Listeners, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elsewhere, "RECONNECT_S", 0.01)
    address = await listeners.open(Asked(), listeners.here)
    there, here = listeners.registry, Registry()
    here.set_mode("disaggregated")
    stale = WorkerInfo(PeerRef("decode-9", 1), Role.DECODE, "a:1", FACTS, 8, 4, 8, 16, "cpu", "fake")
    here.register(stale)
    there.set_mode("colocated")
    peer = PeerRef("decode-0", 3)
    there.register(WorkerInfo(peer, Role.DECODE, "a:1", FACTS, 8, 4, 8, 16, "cpu", "fake"))
    before = here.membership().revision
    following = asyncio.ensure_future(mirror(address, "secret", here))
    await until(lambda: [worker.peer for worker in here.membership().workers] == [peer])
    assert here.membership().mode == "colocated"
    assert here.membership().revision > before
    there.unregister(peer)
    await until(lambda: not here.membership().workers)
    await listeners.servers[0].stop(None)
    await asyncio.sleep(0.05)
    assert not following.done()
    following.cancel()


async def test_a_membership_that_cannot_be_followed_is_followed_by_the_next(
    listeners: Listeners, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elsewhere, "RECONNECT_S", 0.01)
    address = await listeners.open(Asked(), listeners.here)
    here = Registry()
    listeners.registry.set_mode("colocated")
    real, failures = here.mirror, [OSError("it is full")]

    def fails_once(membership: Membership) -> None:
        if failures:
            raise failures.pop()
        real(membership)

    monkeypatch.setattr(here, "mirror", fails_once)
    following = asyncio.ensure_future(mirror(address, "secret", here))
    await until(lambda: here.membership().mode == "colocated" or following.done())
    assert not following.done()
    following.cancel()


def test_workers_that_no_controller_supervises_are_removed() -> None:
    registry = Registry()
    for number in (1, 2):
        peer = PeerRef(f"decode-{number}", number)
        registry.register(WorkerInfo(peer, Role.DECODE, "a:1", FACTS, 8, 4, 8, 16, "cpu", "fake"))
    registry.keep({PeerRef("decode-1", 1)})
    assert [worker.peer.worker_id for worker in registry.membership().workers] == ["decode-1"]


async def test_a_membership_is_sent_only_when_all_workers_that_serve_are_known(listeners: Listeners) -> None:
    """Routers keep that of a controller that died until then, and go on sending requests."""
    listeners.registry = registry = Registry()
    peers = [PeerRef("prefill-0", 1), PeerRef("decode-0", 1)]
    seen: list[Membership] = []
    async with open_channel(await listeners.open(Asked(), listeners.here), "secret") as channel:

        async def watch() -> None:
            async for message in cluster_pb2_grpc.ClusterStub(channel).Watch(cluster_pb2.WatchRequest()):
                seen.append(conversion.from_proto(message, Membership))

        watching = asyncio.ensure_future(watch())
        for peer in peers:
            await cluster_pb2_grpc.ClusterStub(channel).ListAbsent(cluster_pb2.ListAbsentRequest())
            registry.register(WorkerInfo(peer, Role.BOTH, "a:1", FACTS, 8, 4, 8, 16, "cpu", "fake"))
        registry.keep(peers)
        await until(lambda: seen)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    assert [{info.peer for info in membership.workers} for membership in seen] == [set(peers)]
