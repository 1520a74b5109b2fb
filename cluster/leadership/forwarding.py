"""A controller whose workers another one keeps: it says what that one says, and passes on what operators ask."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc.aio

from cluster.operations.operator import Operator
from cluster.service import ClusterServicer
from cluster.supervision.registry import Registry
from wire import convert, rpc
from wire.generated.tandem.v1 import cluster_pb2, cluster_pb2_grpc

log = logging.getLogger(__name__)

RECONNECT_S = 0.5

_Context = grpc.aio.ServicerContext[Any, Any]
Reply = TypeVar("Reply")


async def mirror(address: str, token: str, registry: Registry) -> None:
    """Let `registry` say what the controller at `address` says, until cancelled; while that one is silent, what it said
    last.
    """
    async with rpc.open_channel(address, token) as channel:
        stub: Any = cluster_pb2_grpc.ClusterStub(channel)
        while True:
            try:
                async for message in stub.Watch(cluster_pb2.WatchRequest(), wait_for_ready=True):
                    registry.mirror(convert.membership_from_proto(message))
            except grpc.aio.AioRpcError as error:
                log.info("the membership of the controller at %s ended: %s", address, error.details())
            except Exception:
                log.exception("a membership could not be followed; the next one is")
            await asyncio.sleep(RECONNECT_S)


class ForwardingServicer(ClusterServicer):
    """Answers itself as long as the workers are its controller's; else the one that keeps them does.

    `elsewhere` waits until that is clear, and gives the listener of another controller, or "".
    """

    def __init__(
        self, registry: Registry, operator: Operator, token: str, elsewhere: Callable[[], Awaitable[str]]
    ) -> None:
        super().__init__(registry, operator)
        self._token = token
        self._elsewhere = elsewhere

    async def SetMode(self, request: cluster_pb2.SetModeRequest, context: _Context) -> cluster_pb2.SetModeResponse:
        own = super().SetMode
        return await self._answer(lambda: own(request, context), lambda stub: stub.SetMode(request))

    async def DrainWorker(
        self, request: cluster_pb2.DrainWorkerRequest, context: _Context
    ) -> cluster_pb2.DrainWorkerResponse:
        own = super().DrainWorker
        return await self._answer(lambda: own(request, context), lambda stub: stub.DrainWorker(request))

    async def Resize(self, request: cluster_pb2.ResizeRequest, context: _Context) -> cluster_pb2.ResizeResponse:
        own = super().Resize
        return await self._answer(lambda: own(request, context), lambda stub: stub.Resize(request))

    async def ListAbsent(
        self, request: cluster_pb2.ListAbsentRequest, context: _Context
    ) -> cluster_pb2.ListAbsentResponse:
        own = super().ListAbsent
        return await self._answer(lambda: own(request, context), lambda stub: stub.ListAbsent(request))

    async def _answer(self, own: Callable[[], Awaitable[Reply]], forwarded: Callable[[Any], Awaitable[Reply]]) -> Reply:
        address = await self._elsewhere()
        if not address:
            return await own()
        async with rpc.open_channel(address, self._token) as channel:
            try:
                return await forwarded(cluster_pb2_grpc.ClusterStub(channel))
            except grpc.aio.AioRpcError as error:
                raise rpc.error_of(error, f"the controller at {address}") from error
