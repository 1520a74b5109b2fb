"""The service of a controller that does not lead: it mirrors the leader's membership and forwards calls to it."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import grpc.aio

from tandem.cluster.operations.adapters import Adapters
from tandem.cluster.operations.operator import Operator
from tandem.cluster.service import ClusterServicer
from tandem.cluster.supervision.registry import Registry
from tandem.net import rpc
from tandem.protocol import conversion
from tandem.protocol.generated.tandem.v1 import cluster_pb2, cluster_pb2_grpc, types_pb2
from tandem.protocol.messages import Membership

log = logging.getLogger(__name__)

RECONNECT_S = 0.5

_Context = grpc.aio.ServicerContext[Any, Any]
Reply = TypeVar("Reply")


async def mirror(address: str, token: str, registry: Registry) -> None:
    """Mirror the membership of the controller at `address` into `registry`, until cancelled.

    While that controller does not respond, `registry` keeps the last membership.
    """
    async with rpc.open_channel(address, token) as channel:
        stub: Any = cluster_pb2_grpc.ClusterStub(channel)
        while True:
            try:
                async for message in stub.Watch(cluster_pb2.WatchRequest(), wait_for_ready=True):
                    registry.mirror(conversion.from_proto(message, Membership))
            except grpc.aio.AioRpcError as error:
                log.info("the membership of the controller at %s ended: %s", address, error.details())
            except Exception:
                log.exception("a membership could not be mirrored; continuing with the next one")
            await asyncio.sleep(RECONNECT_S)


class ForwardingServicer(ClusterServicer):
    """The servicer of one controller: it handles calls while this controller leads, else it forwards them.

    `elsewhere` waits until the leader is known; it returns the leader's listener, or "" if this controller leads.
    """

    def __init__(
        self,
        registry: Registry,
        operator: Operator,
        adapters: Adapters,
        metrics: Callable[[], Awaitable[str]],
        *,
        token: str,
        elsewhere: Callable[[], Awaitable[str]],
    ) -> None:
        super().__init__(registry, operator, adapters, metrics)
        self._token = token
        self._elsewhere = elsewhere

    async def Watch(
        self, request: cluster_pb2.WatchRequest, context: _Context
    ) -> AsyncIterator[cluster_pb2.Membership]:
        """Stream the membership once it is complete, and after each change.

        If this controller replaces a dead one, routers and workers keep the dead controller's last membership until the
        membership of this controller is complete.
        """
        await self._registry.complete.wait()
        async for membership in super().Watch(request, context):
            yield membership

    async def SetMode(self, request: cluster_pb2.SetModeRequest, context: _Context) -> cluster_pb2.SetModeResponse:
        """Change the mode, here or at the leader."""
        own = super().SetMode
        return await self._answer(lambda: own(request, context), lambda stub: stub.SetMode(request))

    async def DrainWorker(
        self, request: cluster_pb2.DrainWorkerRequest, context: _Context
    ) -> cluster_pb2.DrainWorkerResponse:
        """Drain a worker, here or at the leader."""
        own = super().DrainWorker
        return await self._answer(lambda: own(request, context), lambda stub: stub.DrainWorker(request))

    async def Resize(self, request: cluster_pb2.ResizeRequest, context: _Context) -> cluster_pb2.ResizeResponse:
        """Change the number of workers, here or at the leader."""
        own = super().Resize
        return await self._answer(lambda: own(request, context), lambda stub: stub.Resize(request))

    async def LoadAdapter(
        self, request: types_pb2.LoadAdapterRequest, context: _Context
    ) -> types_pb2.LoadAdapterResponse:
        """Load an adapter, here or at the leader."""
        own = super().LoadAdapter
        return await self._answer(lambda: own(request, context), lambda stub: stub.LoadAdapter(request))

    async def UnloadAdapter(
        self, request: types_pb2.UnloadAdapterRequest, context: _Context
    ) -> types_pb2.UnloadAdapterResponse:
        """Unload an adapter, here or at the leader."""
        own = super().UnloadAdapter
        return await self._answer(lambda: own(request, context), lambda stub: stub.UnloadAdapter(request))

    async def ListAbsent(
        self, request: cluster_pb2.ListAbsentRequest, context: _Context
    ) -> cluster_pb2.ListAbsentResponse:
        """List absent workers, here or at the leader."""
        own = super().ListAbsent
        return await self._answer(lambda: own(request, context), lambda stub: stub.ListAbsent(request))

    async def GetMetrics(
        self, request: cluster_pb2.GetMetricsRequest, context: _Context
    ) -> cluster_pb2.GetMetricsResponse:
        """Return the metrics of the processes that this controller or the leader supervises."""
        own = super().GetMetrics
        return await self._answer(lambda: own(request, context), lambda stub: stub.GetMetrics(request))

    async def _answer(self, own: Callable[[], Awaitable[Reply]], forwarded: Callable[[Any], Awaitable[Reply]]) -> Reply:
        address = await self._elsewhere()
        if not address:
            return await own()
        async with rpc.open_channel(address, self._token) as channel:
            try:
                return await forwarded(cluster_pb2_grpc.ClusterStub(channel))
            except grpc.aio.AioRpcError as error:
                raise rpc.error_of(error, f"the controller at {address}") from error
