"""Between protobuf and dataclasses: the only file that knows both.

`x_to_proto` and `x_from_proto` are inverses (a property test holds them to it). Values are taken as they are;
whoever receives a message from outside validates it.
"""

from collections.abc import Iterable
from typing import cast

from wire.generated.tandem.v1 import cluster_pb2, inference_pb2, types_pb2, worker_pb2
from wire.messages import (
    Destination,
    ErrorDetail,
    FinishReason,
    GrantedLease,
    Handshake,
    Lease,
    Membership,
    ModelFacts,
    PeerDescription,
    PeerRef,
    PrefillTask,
    RequestEvent,
    RequestRef,
    Reservation,
    Role,
    SamplingParams,
    StepEvents,
    TransferNotice,
    WorkerInfo,
    WorkerInspection,
    WorkerLoad,
)
from wire.timeline import Edge, EdgeStamp, Timeline, TransferStats

# ---- types.proto ----


def sampling_to_proto(value: SamplingParams) -> types_pb2.SamplingParams:
    return types_pb2.SamplingParams(
        temperature=value.temperature,
        top_k=value.top_k,
        top_p=value.top_p,
        min_p=value.min_p,
        seed=value.seed,
        max_tokens=value.max_tokens,
        stop_token_ids=value.stop_token_ids,
        ignore_eos=value.ignore_eos,
    )


def sampling_from_proto(message: types_pb2.SamplingParams) -> SamplingParams:
    return SamplingParams(
        max_tokens=message.max_tokens,
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        seed=message.seed,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
    )


def finish_to_proto(value: FinishReason | None) -> types_pb2.FinishReason:
    return cast(types_pb2.FinishReason, value or 0)


def finish_from_proto(value: int) -> FinishReason | None:
    return FinishReason(value) if value else None


def error_to_proto(value: ErrorDetail) -> types_pb2.ErrorDetail:
    return types_pb2.ErrorDetail(code=value.code, message=value.message, retry_after_s=value.retry_after_s)


def error_from_proto(message: types_pb2.ErrorDetail) -> ErrorDetail:
    return ErrorDetail(message.code, message.message, message.retry_after_s)


def edges_to_proto(edges: Iterable[EdgeStamp]) -> list[types_pb2.EdgeStamp]:
    return [types_pb2.EdgeStamp(edge=cast(types_pb2.Edge, s.edge), unix_nanos=s.unix_nanos) for s in edges]


def edges_from_proto(messages: Iterable[types_pb2.EdgeStamp]) -> tuple[EdgeStamp, ...]:
    return tuple(EdgeStamp(Edge(m.edge), m.unix_nanos) for m in messages)


def transfer_to_proto(value: TransferStats) -> types_pb2.TransferStats:
    return types_pb2.TransferStats(
        bytes=value.bytes, pages=value.pages, backend=value.backend, duration_nanos=value.duration_nanos
    )


def transfer_from_proto(message: types_pb2.TransferStats) -> TransferStats:
    return TransferStats(message.bytes, message.pages, message.backend, message.duration_nanos)


# ---- inference.proto ----


def timeline_to_proto(value: Timeline) -> inference_pb2.Timeline:
    return inference_pb2.Timeline(
        edges=edges_to_proto(value.edges),
        transfer=None if value.transfer is None else transfer_to_proto(value.transfer),
        prefill_worker=value.prefill_worker,
        decode_worker=value.decode_worker,
    )


def timeline_from_proto(message: inference_pb2.Timeline) -> Timeline:
    return Timeline(
        edges=edges_from_proto(message.edges),
        transfer=transfer_from_proto(message.transfer) if message.HasField("transfer") else None,
        prefill_worker=message.prefill_worker,
        decode_worker=message.decode_worker,
    )


# ---- worker.proto: router to worker ----


def ref_to_proto(value: RequestRef) -> worker_pb2.RequestRef:
    return worker_pb2.RequestRef(request_id=value.request_id, attempt=value.attempt)


def ref_from_proto(message: worker_pb2.RequestRef) -> RequestRef:
    return RequestRef(message.request_id, message.attempt)


def lease_to_proto(value: Lease) -> worker_pb2.Lease:
    return worker_pb2.Lease(request_id=value.request_id, attempt=value.attempt, epoch=value.epoch)


def lease_from_proto(message: worker_pb2.Lease) -> Lease:
    return Lease(message.request_id, message.attempt, message.epoch)


def reservation_to_proto(value: Reservation) -> worker_pb2.ReserveRequest:
    return worker_pb2.ReserveRequest(
        router_id=value.router_id,
        request_id=value.ref.request_id,
        attempt=value.ref.attempt,
        prompt_token_ids=value.prompt_token_ids,
        sampling=sampling_to_proto(value.sampling),
        prefill_worker_id=value.prefill.worker_id,
        prefill_incarnation=value.prefill.incarnation,
    )


def reservation_from_proto(message: worker_pb2.ReserveRequest) -> Reservation:
    return Reservation(
        router_id=message.router_id,
        ref=RequestRef(message.request_id, message.attempt),
        prompt_token_ids=tuple(message.prompt_token_ids),
        sampling=sampling_from_proto(message.sampling),
        prefill=PeerRef(message.prefill_worker_id, message.prefill_incarnation),
    )


def granted_to_proto(value: GrantedLease) -> worker_pb2.ReserveResponse:
    return worker_pb2.ReserveResponse(lease=lease_to_proto(value.lease), duration_s=value.duration_s)


def granted_from_proto(message: worker_pb2.ReserveResponse) -> GrantedLease:
    return GrantedLease(lease_from_proto(message.lease), message.duration_s)


def destination_to_proto(value: Destination) -> worker_pb2.Destination:
    return worker_pb2.Destination(
        worker_id=value.peer.worker_id,
        incarnation=value.peer.incarnation,
        address=value.address,
        lease=lease_to_proto(value.lease),
    )


def destination_from_proto(message: worker_pb2.Destination) -> Destination:
    return Destination(
        PeerRef(message.worker_id, message.incarnation), message.address, lease_from_proto(message.lease)
    )


def prefill_task_to_proto(value: PrefillTask) -> worker_pb2.PrefillRequest:
    return worker_pb2.PrefillRequest(
        router_id=value.router_id,
        request_id=value.ref.request_id,
        attempt=value.ref.attempt,
        prompt_token_ids=value.prompt_token_ids,
        sampling=sampling_to_proto(value.sampling),
        destination=None if value.destination is None else destination_to_proto(value.destination),
    )


def prefill_task_from_proto(message: worker_pb2.PrefillRequest) -> PrefillTask:
    return PrefillTask(
        router_id=message.router_id,
        ref=RequestRef(message.request_id, message.attempt),
        prompt_token_ids=tuple(message.prompt_token_ids),
        sampling=sampling_from_proto(message.sampling),
        destination=destination_from_proto(message.destination) if message.HasField("destination") else None,
    )


# ---- worker.proto: worker to router ----


def event_to_proto(value: RequestEvent) -> worker_pb2.RequestEvent:
    return worker_pb2.RequestEvent(
        request_id=value.ref.request_id,
        attempt=value.ref.attempt,
        first_index=value.first_index,
        token_ids=value.token_ids,
        finish_reason=finish_to_proto(value.finish_reason),
        error=None if value.error is None else error_to_proto(value.error),
        edges=edges_to_proto(value.edges),
        transfer=None if value.transfer is None else transfer_to_proto(value.transfer),
    )


def event_from_proto(message: worker_pb2.RequestEvent) -> RequestEvent:
    return RequestEvent(
        ref=RequestRef(message.request_id, message.attempt),
        first_index=message.first_index,
        token_ids=tuple(message.token_ids),
        finish_reason=finish_from_proto(message.finish_reason),
        error=error_from_proto(message.error) if message.HasField("error") else None,
        edges=edges_from_proto(message.edges),
        transfer=transfer_from_proto(message.transfer) if message.HasField("transfer") else None,
    )


def load_to_proto(value: WorkerLoad) -> worker_pb2.WorkerLoad:
    return worker_pb2.WorkerLoad(
        prefill_requests=value.prefill_requests,
        prefill_tokens=value.prefill_tokens,
        decode_requests=value.decode_requests,
        pages_used=value.pages_used,
        pages_total=value.pages_total,
    )


def load_from_proto(message: worker_pb2.WorkerLoad) -> WorkerLoad:
    return WorkerLoad(
        message.prefill_requests,
        message.prefill_tokens,
        message.decode_requests,
        message.pages_used,
        message.pages_total,
    )


def step_events_to_proto(value: StepEvents) -> worker_pb2.StepEvents:
    return worker_pb2.StepEvents(
        step=value.step, events=[event_to_proto(e) for e in value.events], load=load_to_proto(value.load)
    )


def step_events_from_proto(message: worker_pb2.StepEvents) -> StepEvents:
    return StepEvents(message.step, tuple(event_from_proto(e) for e in message.events), load_from_proto(message.load))


def inspection_to_proto(value: WorkerInspection) -> worker_pb2.InspectResponse:
    return worker_pb2.InspectResponse(
        worker_id=value.peer.worker_id,
        incarnation=value.peer.incarnation,
        pages_total=value.pages_total,
        pages_free=value.pages_free,
        pages_owned=value.pages_owned,
        pages_shared=value.pages_shared,
        pages_advertised=value.pages_advertised,
        pages_quarantined=value.pages_quarantined,
        pages_promised=value.pages_promised,
        requests=value.requests,
        leases=value.leases,
        integrity_error=value.integrity_error,
        fenced=value.fenced,
    )


def inspection_from_proto(message: worker_pb2.InspectResponse) -> WorkerInspection:
    return WorkerInspection(
        peer=PeerRef(message.worker_id, message.incarnation),
        pages_total=message.pages_total,
        pages_free=message.pages_free,
        pages_owned=message.pages_owned,
        pages_shared=message.pages_shared,
        pages_advertised=message.pages_advertised,
        pages_quarantined=message.pages_quarantined,
        pages_promised=message.pages_promised,
        requests=message.requests,
        leases=message.leases,
        integrity_error=message.integrity_error,
        fenced=message.fenced,
    )


# ---- worker.proto: worker to worker ----


def description_to_proto(value: PeerDescription) -> worker_pb2.PeerDescription:
    return worker_pb2.PeerDescription(
        worker_id=value.peer.worker_id,
        incarnation=value.peer.incarnation,
        agent_metadata=value.agent_metadata,
        base_address=value.base_address,
        page_bytes=value.page_bytes,
        pages=value.pages,
        device_id=value.device_id,
        memory=value.memory,
    )


def description_from_proto(message: worker_pb2.PeerDescription) -> PeerDescription:
    return PeerDescription(
        peer=PeerRef(message.worker_id, message.incarnation),
        agent_metadata=message.agent_metadata,
        base_address=message.base_address,
        page_bytes=message.page_bytes,
        pages=message.pages,
        device_id=message.device_id,
        memory=message.memory,
    )


def handshake_to_proto(value: Handshake) -> worker_pb2.ConnectPeerRequest:
    return worker_pb2.ConnectPeerRequest(
        protocol_version=value.protocol_version,
        compatibility_hash=value.compatibility_hash,
        compatibility_facts=dict(value.compatibility_facts),
        peer=description_to_proto(value.description),
    )


def handshake_from_proto(message: worker_pb2.ConnectPeerRequest) -> Handshake:
    return Handshake(
        protocol_version=message.protocol_version,
        compatibility_hash=message.compatibility_hash,
        compatibility_facts=tuple(sorted(message.compatibility_facts.items())),
        description=description_from_proto(message.peer),
    )


def notice_to_proto(value: TransferNotice) -> worker_pb2.TransferNotice:
    return worker_pb2.TransferNotice(
        lease=lease_to_proto(value.lease),
        prefill_worker_id=value.prefill.worker_id,
        prefill_incarnation=value.prefill.incarnation,
        token_hash=value.token_hash,
        pages=value.pages,
        first_token_id=value.first_token_id,
        next_draw=value.next_draw,
    )


def notice_from_proto(message: worker_pb2.TransferNotice) -> TransferNotice:
    return TransferNotice(
        lease=lease_from_proto(message.lease),
        prefill=PeerRef(message.prefill_worker_id, message.prefill_incarnation),
        token_hash=message.token_hash,
        pages=message.pages,
        first_token_id=message.first_token_id,
        next_draw=message.next_draw,
    )


def encode_notice(value: TransferNotice) -> bytes:
    """The bytes that travel as a transfer's notification."""
    return notice_to_proto(value).SerializeToString()


def decode_notice(data: bytes) -> TransferNotice:
    """Inverse of `encode_notice`; google.protobuf.message.DecodeError on anything else."""
    return notice_from_proto(worker_pb2.TransferNotice.FromString(data))


# ---- cluster.proto ----


def worker_info_to_proto(value: WorkerInfo) -> cluster_pb2.WorkerInfo:
    return cluster_pb2.WorkerInfo(
        worker_id=value.peer.worker_id,
        incarnation=value.peer.incarnation,
        role=value.role.value,
        address=value.address,
        model=cluster_pb2.ModelFacts(
            name=value.model.name,
            vocab_size=value.model.vocab_size,
            max_context=value.model.max_context,
            eos_token_ids=value.model.eos_token_ids,
            dtype=value.model.dtype,
        ),
        pages_total=value.pages_total,
        page_tokens=value.page_tokens,
        max_batch_requests=value.max_batch_requests,
        max_step_tokens=value.max_step_tokens,
        device=value.device,
        transport=value.transport,
    )


def worker_info_from_proto(message: cluster_pb2.WorkerInfo) -> WorkerInfo:
    model = message.model
    return WorkerInfo(
        peer=PeerRef(message.worker_id, message.incarnation),
        role=Role(message.role),
        address=message.address,
        model=ModelFacts(model.name, model.vocab_size, model.max_context, tuple(model.eos_token_ids), model.dtype),
        pages_total=message.pages_total,
        page_tokens=message.page_tokens,
        max_batch_requests=message.max_batch_requests,
        max_step_tokens=message.max_step_tokens,
        device=message.device,
        transport=message.transport,
    )


def membership_to_proto(value: Membership) -> cluster_pb2.Membership:
    return cluster_pb2.Membership(revision=value.revision, workers=[worker_info_to_proto(w) for w in value.workers])


def membership_from_proto(message: cluster_pb2.Membership) -> Membership:
    return Membership(message.revision, tuple(worker_info_from_proto(w) for w in message.workers))
