"""Limits of a public gRPC server on calls and connections."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from tandem.net import rpc
from tandem.net.security.api_keys import ApiKeys, KeySource
from tandem.protocol.errors import InvalidArgument
from tandem.protocol.generated.tandem.v1 import cluster_pb2, cluster_pb2_grpc
from tandem.settings.listeners import ListenerLimits
from tests.unit.router.fake_cluster import until

SHORT = 0.1
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
PING = b"\x00\x00\x08\x06\x00\x00\x00\x00\x00tandem-1"
PING_REPLY = b"\x00\x00\x08\x06\x01\x00\x00\x00\x00tandem-1"
REGISTER = "/tandem.v1.Cluster/Register"


class Held(cluster_pb2_grpc.ClusterServicer):
    """A servicer that answers once the test allows it."""

    def __init__(self) -> None:
        self.go, self.begun = asyncio.Event(), 0

    async def Register(self, request: Any, context: Any) -> cluster_pb2.RegisterResponse:
        self.begun += 1
        await self.go.wait()
        return cluster_pb2.RegisterResponse()

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[cluster_pb2.Membership]:
        self.begun += 1
        yield cluster_pb2.Membership(revision=1)
        await self.go.wait()


@contextlib.asynccontextmanager
async def serving(servicer: Held, limits: ListenerLimits, keys: tuple[str, ...] = ()) -> AsyncIterator[int]:
    server = rpc.open_server(
        limits=limits, check=ApiKeys(KeySource(keys)).check, open_methods=("/grpc.health.v1.Health/",)
    )
    cluster_pb2_grpc.add_ClusterServicer_to_server(servicer, server)
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        servicer.go.set()
        await server.stop(None)


def channel_to(port: int) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)])


async def status_of(call: Any) -> grpc.StatusCode:
    async with asyncio.timeout(60):
        status: grpc.StatusCode = await call.code()
    return status


async def test_calls_whose_message_does_not_come_are_ended() -> None:
    """The server cannot distinguish a call with a request stream on which nothing is sent."""
    async with serving(Held(), ListenerLimits(body_timeout_s=SHORT)) as port, channel_to(port) as channel:
        one = channel.stream_unary(REGISTER)()
        many = channel.stream_stream("/tandem.v1.Cluster/Watch")()
        open_to_all = channel.stream_unary("/grpc.health.v1.Health/Check")()
        for call in (one, many, open_to_all):
            assert await status_of(call) is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "did not come" in str(await call.details())


async def test_a_call_without_a_key_is_refused_before_its_message() -> None:
    async with serving(Held(), ListenerLimits(), frozenset({"key"})) as port, channel_to(port) as channel:
        assert await status_of(channel.stream_unary(REGISTER)()) is grpc.StatusCode.UNAUTHENTICATED


async def test_no_message_and_no_proper_one_are_the_client_s_fault() -> None:
    async with serving(Held(), ListenerLimits()) as port, channel_to(port) as channel:
        for sent in ([], [b"\xff"]):
            call = channel.stream_unary(REGISTER)(iter(sent))
            assert await status_of(call) is grpc.StatusCode.INVALID_ARGUMENT


async def test_calls_in_progress_are_bounded_and_health_answers_all_the_same() -> None:
    servicer = Held()
    async with (
        serving(servicer, ListenerLimits(max_calls=2)) as port,
        channel_to(port) as channel,
        channel_to(port) as other,
    ):
        stub, health_stub = cluster_pb2_grpc.ClusterStub(channel), health_pb2_grpc.HealthStub(other)
        unary = stub.Register(cluster_pb2.RegisterRequest())
        stream = stub.Watch(cluster_pb2.WatchRequest())
        await stream.read()
        await until(lambda: servicer.begun == 2, "both are in progress")
        over = cluster_pb2_grpc.ClusterStub(other).Register(cluster_pb2.RegisterRequest())
        assert await status_of(over) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert dict(await over.trailing_metadata() or ())[rpc.RETRY_AFTER] == "1"
        await health_stub.Check(health_pb2.HealthCheckRequest())
        stream.cancel()
        for _ in range(1000):  # the call is released as soon as the server sees the cancellation
            last = cluster_pb2_grpc.ClusterStub(other).Watch(cluster_pb2.WatchRequest())
            with contextlib.suppress(grpc.aio.AioRpcError):
                await last.read()
                break
            assert await last.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            await asyncio.sleep(0.01)
        servicer.go.set()
        await unary
        assert await status_of(last) is grpc.StatusCode.OK


async def test_more_calls_at_once_than_grpc_keeps_pending_are_all_answered() -> None:
    """By default gRPC cancels some of them, without a reason, while a thousand are not yet accepted."""
    servicer = Held()
    servicer.go.set()
    async with serving(servicer, ListenerLimits()) as port, contextlib.AsyncExitStack() as channels:
        opened = [await channels.enter_async_context(channel_to(port)) for _ in range(8)]
        stubs = [cluster_pb2_grpc.ClusterStub(channel) for channel in opened]
        calls = [stub.Register(cluster_pb2.RegisterRequest()) for stub in stubs for _ in range(250)]
        assert {await status_of(call) for call in calls} == {grpc.StatusCode.OK}


async def test_a_message_over_the_limit_is_refused_by_grpc_itself() -> None:
    async with serving(Held(), ListenerLimits(max_request_bytes=1000)) as port, channel_to(port) as channel:
        call = channel.unary_unary(REGISTER)(b"x" * 1001)
        assert await status_of(call) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "1000" in str(await call.details())


async def until_closed(reader: asyncio.StreamReader) -> None:
    async with asyncio.timeout(60):
        with contextlib.suppress(ConnectionResetError):
            await reader.read()


@pytest.mark.parametrize(
    ("limits", "sent"),
    [
        (ListenerLimits(header_timeout_s=SHORT), b""),
        (ListenerLimits(header_timeout_s=SHORT), PREFACE[:10]),
        (ListenerLimits(keepalive_s=SHORT), PREFACE + SETTINGS),
        (ListenerLimits(idle_timeout_s=SHORT), PREFACE + SETTINGS),
    ],
    ids=["silent", "half a handshake", "no answer to pings", "idle"],
)
async def test_connections_that_do_not_go_on_are_ended(limits: ListenerLimits, sent: bytes) -> None:
    async with serving(Held(), replace(limits)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        await until_closed(reader)
        writer.close()


async def test_a_slow_client_s_pings_are_answered_and_a_flood_of_pings_ends_the_connection() -> None:
    async with serving(Held(), ListenerLimits()) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(PREFACE + SETTINGS)
        for _ in range(20):
            writer.write(PING)
            await reader.readuntil(PING_REPLY)
        writer.write(PING * 200)
        await until_closed(reader)
        writer.close()


@pytest.mark.parametrize("name", list(ListenerLimits.__slots__))
def test_limits_are_above_0(name: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        replace(ListenerLimits(), **{name: 0})
    assert refusal.value.field == name
