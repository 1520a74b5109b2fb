"""Errors become status codes in one place, and only callers with a key are accepted."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from tandem.net import rpc
from tandem.net.security.api_keys import ApiKeys, KeySource
from tandem.protocol import errors
from tandem.protocol.generated.tandem.v1 import cluster_pb2, cluster_pb2_grpc
from tests.keyed_channel import keyed_channel


class Broken(cluster_pb2_grpc.ClusterServicer):
    """Raises the given error from a unary and from a streaming handler."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def Register(self, request: Any, context: Any) -> cluster_pb2.RegisterResponse:
        raise self.error

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[cluster_pb2.Membership]:
        yield cluster_pb2.Membership(revision=1)
        raise self.error


class Serving:
    """A server with one servicer on an ephemeral port, and a stub for it."""

    def __init__(self, error: Exception, keys: tuple[str, ...] = (), key: str = "") -> None:
        self.error, self.keys, self.key = error, keys, key

    async def __aenter__(self) -> cluster_pb2_grpc.ClusterStub:
        self.server = rpc.open_server(check=ApiKeys(KeySource(self.keys)).check)
        cluster_pb2_grpc.add_ClusterServicer_to_server(Broken(self.error), self.server)
        port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        self.channel = keyed_channel(f"127.0.0.1:{port}", self.key)
        return cluster_pb2_grpc.ClusterStub(self.channel)

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()
        await self.server.stop(None)


ALL = [c("a sentence") for c in errors._BY_CODE.values()] + [errors.InvalidArgument("top_p", "must be in (0, 1]")]


@pytest.mark.parametrize("error", ALL, ids=lambda e: e.code)
async def test_typed_error_travels(error: errors.TandemError) -> None:
    async with Serving(error) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Register(cluster_pb2.RegisterRequest())
        assert caught.value.code() is error.grpc_status
        back = rpc.error_of(caught.value, "peer")
        assert type(back) is type(error)
        assert error.message in back.message


async def test_error_in_a_stream_comes_after_its_messages() -> None:
    async with Serving(errors.ResourceExhausted("full", retry_after_s=1.5)) as stub:
        call = stub.Watch(cluster_pb2.WatchRequest())
        assert (await call.read()).revision == 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        back = rpc.error_of(caught.value, "peer")
        assert isinstance(back, errors.ResourceExhausted)
        assert back.retry_after_s == 1.5


async def test_unexpected_error_is_internal_and_keeps_its_secret() -> None:
    async with Serving(ValueError("secret")) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Register(cluster_pb2.RegisterRequest())
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert "secret" not in (caught.value.details() or "")
        assert "ValueError" in (caught.value.details() or "")


@pytest.mark.parametrize(("key", "enters"), [("", False), ("wrong", False), ("right", True), ("other", True)])
async def test_key(key: str, enters: bool) -> None:
    async with Serving(errors.NotFound("inside"), frozenset({"right", "other"}), key) as stub:
        expected = grpc.StatusCode.NOT_FOUND if enters else grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.aio.AioRpcError) as unary:
            await stub.Register(cluster_pb2.RegisterRequest())
        assert unary.value.code() is expected
        with pytest.raises(grpc.aio.AioRpcError) as stream:
            async for _ in stub.Watch(cluster_pb2.WatchRequest()):
                pass
        assert stream.value.code() is expected


@pytest.mark.parametrize("header", [None, "", "right", "Bearer ", "Basic right"])
async def test_a_key_without_its_scheme_or_none_at_all_opens_no_listener(header: str | None) -> None:
    for keys in (("right", ""), ("",)):
        async with Serving(errors.NotFound("inside"), keys) as stub:
            metadata = None if header is None else ((rpc.AUTHORIZATION, header),)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Register(cluster_pb2.RegisterRequest(), metadata=metadata)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_an_address_without_a_server_is_unavailable() -> None:
    channel = rpc.open_channel("127.0.0.1:1")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cluster_pb2_grpc.ClusterStub(channel).Register(cluster_pb2.RegisterRequest(), timeout=5)
    error = rpc.error_of(caught.value, "the controller")
    assert isinstance(error, errors.Unavailable)
    assert error.message.startswith("the controller: ")
    await channel.close()
