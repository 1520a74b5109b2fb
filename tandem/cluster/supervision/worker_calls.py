"""The controller's calls to workers, through their own listeners."""

from collections.abc import Awaitable, Callable, Collection
from typing import Any, TypeVar

import grpc.aio

from tandem.net import rpc
from tandem.protocol import conversion
from tandem.protocol.generated.tandem.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from tandem.protocol.messages import AdapterFacts, Assignment, WorkerInfo, WorkerInspection

ANSWER_S = 5.0
"""Timeout of calls that a worker can complete immediately, in seconds."""
LOAD_S = 120.0
"""Timeout of a call that reads an adapter's files, in seconds."""


Reply = TypeVar("Reply")


class WorkerCalls:
    """The controller's calls to workers. Every failure is raised as a TandemError that names the worker."""

    def __init__(self, token: str) -> None:
        self._token = token

    async def set_assignment(self, info: WorkerInfo, assignment: Assignment, grace_s: float) -> None:
        """Send a worker its assignment; closing schedulers have `grace_s` seconds for their requests."""
        request = worker_pb2.SetAssignmentRequest(
            peer=conversion.to_proto(info.peer, types_pb2.PeerRef),
            assignment=conversion.to_proto(assignment, types_pb2.Assignment),
            grace_s=grace_s,
        )
        await self._call(info, lambda stub: stub.SetAssignment(request, timeout=ANSWER_S))

    async def adapters_in_use(self, info: WorkerInfo) -> Collection[str]:
        """Return the hashes of the adapters that a worker's requests use.

        A request counts from the reservation of its pages.
        """
        reply = await self._call(info, lambda stub: stub.Inspect(worker_pb2.InspectRequest(), timeout=ANSWER_S))
        return conversion.from_proto(reply, WorkerInspection).adapters_in_use

    async def load_adapter(self, info: WorkerInfo, adapter: AdapterFacts, in_use: Collection[str]) -> AdapterFacts:
        """Have a worker load an adapter and return the adapter that it loaded.

        An adapter with an empty `identity` may have any hash. The worker may not reuse the slots of the adapters whose
        hashes are `in_use`.
        """
        request = worker_pb2.LoadWorkerAdapterRequest(
            peer=conversion.to_proto(info.peer, types_pb2.PeerRef),
            adapter=conversion.to_proto(adapter, types_pb2.AdapterFacts),
            in_use=in_use,
        )
        reply = await self._call(info, lambda stub: stub.LoadAdapter(request, timeout=LOAD_S))
        return conversion.from_proto(reply.adapter, AdapterFacts)

    async def unload_adapter(self, info: WorkerInfo, name: str) -> None:
        """Have a worker unload an adapter, if it has it."""
        request = worker_pb2.UnloadWorkerAdapterRequest(
            peer=conversion.to_proto(info.peer, types_pb2.PeerRef), name=name
        )
        await self._call(info, lambda stub: stub.UnloadAdapter(request, timeout=ANSWER_S))

    async def drain(self, info: WorkerInfo, grace_s: float) -> None:
        """Drain a worker; return when it has no requests left or has abandoned the rest after `grace_s` seconds."""
        request = worker_pb2.DrainRequest(grace_s=grace_s)
        await self._call(info, lambda stub: stub.Drain(request, timeout=grace_s + ANSWER_S))

    async def _call(self, info: WorkerInfo, ask: Callable[[Any], Awaitable[Reply]]) -> Reply:
        """Return the reply to the call that `ask` makes on the worker's stub."""
        async with rpc.open_channel(info.address, self._token) as channel:
            try:
                return await ask(worker_pb2_grpc.WorkerStub(channel))
            except grpc.aio.AioRpcError as error:
                raise rpc.error_of(error, f"worker {info.peer.worker_id}") from error
