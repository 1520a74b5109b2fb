"""The controller's calls to workers, through their own listeners."""

import grpc.aio

from wire import convert, rpc
from wire.generated.tandem.v1 import worker_pb2, worker_pb2_grpc
from wire.messages import AdapterFacts, Assignment, WorkerInfo

ANSWER_S = 5.0
"""Timeout of calls that a worker can complete immediately, in seconds."""
LOAD_S = 120.0
"""Timeout of a call that reads an adapter's files, in seconds."""


class WorkerCalls:
    """Calls to workers; each failure is the typed error that names the worker."""

    def __init__(self, token: str) -> None:
        self._token = token

    async def set_assignment(self, info: WorkerInfo, assignment: Assignment, grace_s: float) -> None:
        """Sends a worker its assignment; halves that close have `grace_s` seconds for their requests."""
        peer = info.peer
        request = worker_pb2.SetAssignmentRequest(
            worker_id=peer.worker_id,
            incarnation=peer.incarnation,
            assignment=convert.assignment_to_proto(assignment),
            grace_s=grace_s,
        )
        async with rpc.open_channel(info.address, self._token) as channel:
            try:
                await worker_pb2_grpc.WorkerStub(channel).SetAssignment(request, timeout=ANSWER_S)
            except grpc.aio.AioRpcError as error:
                raise rpc.error_of(error, f"worker {peer.worker_id}") from error

    async def load_adapter(self, info: WorkerInfo, adapter: AdapterFacts) -> AdapterFacts:
        """Has a worker load an adapter, with any hash if its identity is empty; returns what was loaded."""
        peer = info.peer
        request = worker_pb2.LoadWorkerAdapterRequest(
            worker_id=peer.worker_id, incarnation=peer.incarnation, adapter=convert.adapter_to_proto(adapter)
        )
        async with rpc.open_channel(info.address, self._token) as channel:
            try:
                reply = await worker_pb2_grpc.WorkerStub(channel).LoadAdapter(request, timeout=LOAD_S)
            except grpc.aio.AioRpcError as error:
                raise rpc.error_of(error, f"worker {peer.worker_id}") from error
        return convert.adapter_from_proto(reply.adapter)

    async def unload_adapter(self, info: WorkerInfo, name: str) -> None:
        """Has a worker unload an adapter; one that it does not have is ignored."""
        peer = info.peer
        request = worker_pb2.UnloadWorkerAdapterRequest(
            worker_id=peer.worker_id, incarnation=peer.incarnation, name=name
        )
        async with rpc.open_channel(info.address, self._token) as channel:
            try:
                await worker_pb2_grpc.WorkerStub(channel).UnloadAdapter(request, timeout=ANSWER_S)
            except grpc.aio.AioRpcError as error:
                raise rpc.error_of(error, f"worker {peer.worker_id}") from error

    async def drain(self, info: WorkerInfo, grace_s: float) -> None:
        """Drains a worker; returns when it has no requests left or gave up the rest after `grace_s` seconds."""
        request = worker_pb2.DrainRequest(grace_s=grace_s)
        async with rpc.open_channel(info.address, self._token) as channel:
            try:
                await worker_pb2_grpc.WorkerStub(channel).Drain(request, timeout=grace_s + ANSWER_S)
            except grpc.aio.AioRpcError as error:
                raise rpc.error_of(error, f"worker {info.peer.worker_id}") from error
