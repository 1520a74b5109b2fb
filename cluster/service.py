"""The controller's gRPC door: workers register, routers and workers watch."""

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from cluster.registry import Registry
from wire import convert
from wire.generated.tandem.v1 import cluster_pb2, cluster_pb2_grpc
from wire.messages import PeerRef

_Context = grpc.aio.ServicerContext[Any, Any]


class ClusterServicer(cluster_pb2_grpc.ClusterServicer):
    """`tandem.v1.Cluster` over a registry."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def Register(self, request: cluster_pb2.RegisterRequest, _context: _Context) -> cluster_pb2.RegisterResponse:
        self._registry.register(convert.worker_info_from_proto(request.worker))
        return cluster_pb2.RegisterResponse()

    async def Unregister(
        self, request: cluster_pb2.UnregisterRequest, _context: _Context
    ) -> cluster_pb2.UnregisterResponse:
        self._registry.unregister(PeerRef(request.worker_id, request.incarnation))
        return cluster_pb2.UnregisterResponse()

    async def Watch(
        self, _request: cluster_pb2.WatchRequest, _context: _Context
    ) -> AsyncIterator[cluster_pb2.Membership]:
        async for membership in self._registry.watch():
            yield convert.membership_to_proto(membership)
