"""The controller's gRPC service: workers register, routers and workers watch, operators change the cluster."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc.aio

from tandem.cluster.operations.adapters import Adapters
from tandem.cluster.operations.operator import Operator
from tandem.cluster.supervision.modes import ModeChange
from tandem.cluster.supervision.registry import Registry
from tandem.cluster.supervision.size import SizeChange
from tandem.protocol import conversion
from tandem.protocol.generated.tandem.v1 import cluster_pb2, cluster_pb2_grpc, types_pb2
from tandem.protocol.messages import PeerRef, WorkerInfo

_Context = grpc.aio.ServicerContext[Any, Any]


class ClusterServicer(cluster_pb2_grpc.ClusterServicer):
    """Implements `tandem.v1.Cluster` over a registry, an operator, the cluster's adapters and its metrics."""

    def __init__(
        self, registry: Registry, operator: Operator, adapters: Adapters, metrics: Callable[[], Awaitable[str]]
    ) -> None:
        """`metrics` scrapes all processes and returns their series as Prometheus text."""
        self._registry = registry
        self._operator = operator
        self._adapters = adapters
        self._metrics = metrics

    async def Register(self, request: cluster_pb2.RegisterRequest, _context: _Context) -> cluster_pb2.RegisterResponse:
        """Register a worker, or a new incarnation of it. Raises StaleEpoch for an incarnation that has ended."""
        self._registry.register(conversion.from_proto(request.worker, WorkerInfo))
        return cluster_pb2.RegisterResponse()

    async def Unregister(
        self, request: cluster_pb2.UnregisterRequest, _context: _Context
    ) -> cluster_pb2.UnregisterResponse:
        """Remove a worker's incarnation for good."""
        self._registry.unregister(conversion.from_proto(request.peer, PeerRef))
        return cluster_pb2.UnregisterResponse()

    async def Watch(
        self, _request: cluster_pb2.WatchRequest, _context: _Context
    ) -> AsyncIterator[cluster_pb2.Membership]:
        """Stream the membership, now and after each change."""
        async for membership in self._registry.watch():
            yield conversion.to_proto(membership, cluster_pb2.Membership)

    async def SetMode(self, request: cluster_pb2.SetModeRequest, _context: _Context) -> cluster_pb2.SetModeResponse:
        """Change mode, roles and step settings; return when every serving worker has its new assignment."""
        began = time.monotonic()
        change = ModeChange(
            request.mode,
            request.prefill,
            request.decode,
            request.step_policy,
            request.step_budget,
            request.itl_target_s,
            request.grace_s,
        )
        workers = await self._operator.set_mode(change)
        return cluster_pb2.SetModeResponse(
            workers=[conversion.to_proto(info, cluster_pb2.WorkerInfo) for info in workers],
            seconds=time.monotonic() - began,
        )

    async def DrainWorker(
        self, request: cluster_pb2.DrainWorkerRequest, _context: _Context
    ) -> cluster_pb2.DrainWorkerResponse:
        """Drain one worker; return when its process has ended or, for a restart, serves again."""
        began = time.monotonic()
        await self._operator.drain_worker(
            request.worker_id,
            request.grace_s,
            restart=request.restart,
            force=request.force,
            node_leaves=request.node_leaves,
        )
        return cluster_pb2.DrainWorkerResponse(seconds=time.monotonic() - began)

    async def Resize(self, request: cluster_pb2.ResizeRequest, _context: _Context) -> cluster_pb2.ResizeResponse:
        """Change the number of workers; return the workers that serve afterwards."""
        began = time.monotonic()
        change = SizeChange(request.prefill, request.decode, request.workers, request.grace_s, request.wait_s)
        workers = await self._operator.resize(change)
        return cluster_pb2.ResizeResponse(
            workers=[conversion.to_proto(info, cluster_pb2.WorkerInfo) for info in workers],
            seconds=time.monotonic() - began,
        )

    async def LoadAdapter(
        self, request: types_pb2.LoadAdapterRequest, _context: _Context
    ) -> types_pb2.LoadAdapterResponse:
        """Have every worker load an adapter; return when requests may name it."""
        loaded = await self._adapters.load(request.lora_name, request.lora_path)
        return types_pb2.LoadAdapterResponse(adapter=conversion.to_proto(loaded, types_pb2.AdapterFacts))

    async def UnloadAdapter(
        self, request: types_pb2.UnloadAdapterRequest, _context: _Context
    ) -> types_pb2.UnloadAdapterResponse:
        """Remove an adapter from the list."""
        await self._adapters.unload(request.lora_name)
        return types_pb2.UnloadAdapterResponse()

    async def ListAbsent(
        self, _request: cluster_pb2.ListAbsentRequest, _context: _Context
    ) -> cluster_pb2.ListAbsentResponse:
        """List the workers that do not serve now, with reasons."""
        absent = (conversion.to_proto(absence, cluster_pb2.Absence) for absence in self._operator.absent())
        return cluster_pb2.ListAbsentResponse(workers=absent)

    async def GetMetrics(
        self, _request: cluster_pb2.GetMetricsRequest, _context: _Context
    ) -> cluster_pb2.GetMetricsResponse:
        """Return the current metrics of all processes."""
        return cluster_pb2.GetMetricsResponse(text=await self._metrics())
