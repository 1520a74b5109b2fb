"""The controller's calls to workers, through their own listeners."""

import grpc.aio

from wire import convert, rpc
from wire.generated.tandem.v1 import worker_pb2, worker_pb2_grpc
from wire.messages import Assignment, WorkerInfo

ANSWER_S = 5.0
"""Timeout of calls that a worker can complete immediately, in seconds."""


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

    async def drain(self, info: WorkerInfo, grace_s: float) -> None:
        """Drains a worker; returns when it has no requests left or gave up the rest after `grace_s` seconds."""
        request = worker_pb2.DrainRequest(grace_s=grace_s)
        async with rpc.open_channel(info.address, self._token) as channel:
            try:
                await worker_pb2_grpc.WorkerStub(channel).Drain(request, timeout=grace_s + ANSWER_S)
            except grpc.aio.AioRpcError as error:
                raise rpc.error_of(error, f"worker {info.peer.worker_id}") from error
