"""The worker's gRPC service: translates messages and calls the worker, which makes every decision."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import grpc.aio

from tandem.protocol import conversion
from tandem.protocol.generated.tandem.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from tandem.protocol.messages import (
    AdapterFacts,
    Assignment,
    Handshake,
    Lease,
    PeerRef,
    PrefillTask,
    PrefixPull,
    RequestRef,
    Reservation,
)
from tandem.protocol.prefixes import PrefixRun
from tandem.worker.worker import Worker

_Context = grpc.aio.ServicerContext[Any, Any]


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """Implements `tandem.v1.Worker` for one worker; `drain` also takes the process out of the cluster."""

    def __init__(self, worker: Worker, drain: Callable[[float], Awaitable[int]]) -> None:
        self._worker = worker
        self._drain = drain

    # ---- routers ----

    async def Attach(
        self, request: worker_pb2.AttachRequest, context: _Context
    ) -> AsyncIterator[worker_pb2.StepOutput]:
        """Stream the router's step outputs until the call is cancelled."""
        stream = self._worker.attach(request.router_id, prefixes=request.prefixes)
        # Not a `finally`: a generator that waits to be read does not learn that its call was cancelled.
        context.add_done_callback(cast(Any, lambda _: self._worker.detach(stream)))
        async for step in stream.messages():
            yield conversion.step_output_to_proto(step)

    async def Reserve(self, request: worker_pb2.ReserveRequest, _context: _Context) -> worker_pb2.ReserveResponse:
        """Reserve KV pages for a request and return the granted lease."""
        reservation = conversion.from_proto(request, Reservation)
        await self._worker.begin_answer(reservation)
        await self._worker.reload(reservation)
        return conversion.to_proto(self._worker.reserve(reservation), worker_pb2.ReserveResponse)

    async def Prefill(self, request: worker_pb2.PrefillRequest, _context: _Context) -> worker_pb2.PrefillResponse:
        """Queue a prompt for prefill."""
        task = conversion.from_proto(request, PrefillTask)
        history = await self._worker.begin_answer(task)
        await self._worker.reload(task)
        self._worker.prefill(task, history)
        return worker_pb2.PrefillResponse()

    async def ReadAhead(self, request: worker_pb2.ReadAheadRequest, _context: _Context) -> worker_pb2.ReadAheadResponse:
        """Begin to load pages of a prompt from tiers of the prefix cache; the reply does not wait for them."""
        await self._worker.read_ahead(conversion.from_proto(request.prefix, PrefixRun))
        return worker_pb2.ReadAheadResponse()

    async def Abort(self, request: worker_pb2.AbortWorkRequest, _context: _Context) -> worker_pb2.AbortWorkResponse:
        """Abort requests of a router."""
        self._worker.abort(request.router_id, [conversion.from_proto(ref, RequestRef) for ref in request.requests])
        return worker_pb2.AbortWorkResponse()

    async def Heartbeat(self, request: worker_pb2.HeartbeatRequest, _context: _Context) -> worker_pb2.HeartbeatResponse:
        """Extend leases, and return the leases that this worker does not know."""
        unknown = self._worker.admission.heartbeat([conversion.from_proto(lease, Lease) for lease in request.leases])
        return worker_pb2.HeartbeatResponse(unknown=[conversion.to_proto(lease, worker_pb2.Lease) for lease in unknown])

    async def Drain(self, request: worker_pb2.DrainRequest, _context: _Context) -> worker_pb2.DrainResponse:
        """Drain the worker and return the number of requests that have not ended."""
        return worker_pb2.DrainResponse(remaining=await self._drain(request.grace_s))

    async def SetAssignment(
        self, request: worker_pb2.SetAssignmentRequest, _context: _Context
    ) -> worker_pb2.SetAssignmentResponse:
        """Set the assignment of this incarnation of the worker."""
        meant = conversion.from_proto(request.peer, PeerRef)
        self._worker.assume(meant, conversion.from_proto(request.assignment, Assignment), request.grace_s)
        return worker_pb2.SetAssignmentResponse()

    async def LoadAdapter(
        self, request: worker_pb2.LoadWorkerAdapterRequest, _context: _Context
    ) -> worker_pb2.LoadWorkerAdapterResponse:
        """Load an adapter and return when requests may use it."""
        meant = conversion.from_proto(request.peer, PeerRef)
        wanted = conversion.from_proto(request.adapter, AdapterFacts)
        loaded = await self._worker.adapters.load(meant, wanted, request.in_use)
        return worker_pb2.LoadWorkerAdapterResponse(adapter=conversion.to_proto(loaded, types_pb2.AdapterFacts))

    async def UnloadAdapter(
        self, request: worker_pb2.UnloadWorkerAdapterRequest, _context: _Context
    ) -> worker_pb2.UnloadWorkerAdapterResponse:
        """Remove an adapter from the list of those that new requests may use."""
        self._worker.adapters.unload(conversion.from_proto(request.peer, PeerRef), request.name)
        return worker_pb2.UnloadWorkerAdapterResponse()

    async def Inspect(self, _request: worker_pb2.InspectRequest, _context: _Context) -> worker_pb2.InspectResponse:
        """Return the identity and state of the worker."""
        return conversion.to_proto(self._worker.report.inspect(), worker_pb2.InspectResponse)

    async def ListPrefixes(
        self, _request: worker_pb2.ListPrefixesRequest, _context: _Context
    ) -> worker_pb2.ListPrefixesResponse:
        """Return the digests of all cached pages that can be reused."""
        return conversion.to_proto(self._worker.report.known_prefixes(), worker_pb2.ListPrefixesResponse)

    # ---- other workers ----

    async def SendPrefix(
        self, request: worker_pb2.SendPrefixRequest, _context: _Context
    ) -> worker_pb2.SendPrefixResponse:
        """Begin to send cached pages of a prefix to a worker that is about to compute the prompt."""
        return worker_pb2.SendPrefixResponse(
            digests=await self._worker.send_prefix(conversion.from_proto(request, PrefixPull))
        )

    async def ConnectPeer(
        self, request: worker_pb2.ConnectPeerRequest, _context: _Context
    ) -> worker_pb2.ConnectPeerResponse:
        """Accept the handshake of a prefill worker and return this worker's description."""
        description = self._worker.peers.accept(conversion.from_proto(request, Handshake))
        return worker_pb2.ConnectPeerResponse(description=conversion.to_proto(description, worker_pb2.PeerDescription))

    async def AllocatePages(
        self, request: worker_pb2.AllocatePagesRequest, _context: _Context
    ) -> worker_pb2.AllocatePagesResponse:
        """Allocate the pages of a lease; the prefill worker may start writes to them for `write_for_s` seconds."""
        writer = conversion.from_proto(request.prefill, PeerRef)
        lease = conversion.from_proto(request.lease, Lease)
        page_ids = self._worker.admission.allocate_pages(lease, request.pages, writer)
        return worker_pb2.AllocatePagesResponse(page_ids=page_ids, write_for_s=self._worker.admission.write_window_s)

    async def RenewPermissions(
        self, request: worker_pb2.RenewPermissionsRequest, _context: _Context
    ) -> worker_pb2.RenewPermissionsResponse:
        """Renew the permission to write under leases, and return the leases that have ended."""
        writer, admission = conversion.from_proto(request.prefill, PeerRef), self._worker.admission
        over = admission.prolong([conversion.from_proto(lease, Lease) for lease in request.leases], writer)
        return worker_pb2.RenewPermissionsResponse(
            over=[conversion.to_proto(lease, worker_pb2.Lease) for lease in over], write_for_s=admission.write_window_s
        )

    async def ReleaseLease(
        self, request: worker_pb2.ReleaseLeaseRequest, _context: _Context
    ) -> worker_pb2.ReleaseLeaseResponse:
        """Release a lease under which no write is in flight and none will follow."""
        writer = conversion.from_proto(request.prefill, PeerRef)
        lease = conversion.from_proto(request.lease, Lease)
        self._worker.admission.release(lease, writer, in_doubt=request.in_doubt)
        return worker_pb2.ReleaseLeaseResponse()

    async def NameDeliveries(
        self, request: worker_pb2.NameDeliveriesRequest, _context: _Context
    ) -> worker_pb2.NameDeliveriesResponse:
        """Receive a prefill worker's report of leases whose transfer notices it sent a while ago."""
        writer = conversion.from_proto(request.prefill, PeerRef)
        self._worker.delivered([conversion.from_proto(lease, Lease) for lease in request.leases], writer)
        return worker_pb2.NameDeliveriesResponse()
