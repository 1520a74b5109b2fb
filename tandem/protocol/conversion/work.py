"""Converts the messages with which routers give work to workers: references, leases, reservations, tasks."""

import math

from tandem.protocol.conversion.types import sampling_from_proto, sampling_to_proto
from tandem.protocol.generated.tandem.v1 import worker_pb2
from tandem.protocol.messages import Destination, GrantedLease, Lease, PeerRef, PrefillTask, RequestRef, Reservation


def ref_to_proto(value: RequestRef) -> worker_pb2.RequestRef:
    """Convert a `RequestRef` to protobuf."""
    return worker_pb2.RequestRef(request_id=value.request_id, attempt=value.attempt)


def ref_from_proto(message: worker_pb2.RequestRef) -> RequestRef:
    """Convert a `RequestRef` from protobuf."""
    return RequestRef(message.request_id, message.attempt)


def lease_to_proto(value: Lease) -> worker_pb2.Lease:
    """Convert a `Lease` to protobuf."""
    return worker_pb2.Lease(request_id=value.request_id, attempt=value.attempt, epoch=value.epoch)


def lease_from_proto(message: worker_pb2.Lease) -> Lease:
    """Convert a `Lease` from protobuf."""
    return Lease(message.request_id, message.attempt, message.epoch)


def reservation_to_proto(value: Reservation) -> worker_pb2.ReserveRequest:
    """Convert a `Reservation` to protobuf."""
    return worker_pb2.ReserveRequest(
        router_id=value.router_id,
        request_id=value.ref.request_id,
        attempt=value.ref.attempt,
        prompt_token_ids=value.prompt_token_ids,
        sampling=sampling_to_proto(value.sampling),
        prefill_worker_id=value.prefill.worker_id,
        prefill_incarnation=value.prefill.incarnation,
        answered=value.answered,
        cache_salt=value.cache_salt,
        gap_target_s=value.gap_target_s if value.gap_target_s < math.inf else 0.0,
        adapter=value.adapter,
    )


def reservation_from_proto(message: worker_pb2.ReserveRequest) -> Reservation:
    """Convert a `Reservation` from protobuf."""
    return Reservation(
        router_id=message.router_id,
        ref=RequestRef(message.request_id, message.attempt),
        prompt_token_ids=tuple(message.prompt_token_ids),
        sampling=sampling_from_proto(message.sampling),
        prefill=PeerRef(message.prefill_worker_id, message.prefill_incarnation),
        answered=message.answered,
        cache_salt=message.cache_salt,
        gap_target_s=message.gap_target_s or math.inf,
        adapter=message.adapter,
    )


def granted_to_proto(value: GrantedLease) -> worker_pb2.ReserveResponse:
    """Convert a `GrantedLease` to protobuf."""
    return worker_pb2.ReserveResponse(
        lease=lease_to_proto(value.lease), duration_s=value.duration_s, held_tokens=value.held_tokens
    )


def granted_from_proto(message: worker_pb2.ReserveResponse) -> GrantedLease:
    """Convert a `GrantedLease` from protobuf."""
    return GrantedLease(lease_from_proto(message.lease), message.duration_s, message.held_tokens)


def destination_to_proto(value: Destination) -> worker_pb2.Destination:
    """Convert a `Destination` to protobuf."""
    return worker_pb2.Destination(
        worker_id=value.peer.worker_id,
        incarnation=value.peer.incarnation,
        address=value.address,
        lease=lease_to_proto(value.lease),
    )


def destination_from_proto(message: worker_pb2.Destination) -> Destination:
    """Convert a `Destination` from protobuf."""
    return Destination(
        PeerRef(message.worker_id, message.incarnation), message.address, lease_from_proto(message.lease)
    )


def prefill_task_to_proto(value: PrefillTask) -> worker_pb2.PrefillRequest:
    """Convert a `PrefillTask` to protobuf."""
    return worker_pb2.PrefillRequest(
        router_id=value.router_id,
        request_id=value.ref.request_id,
        attempt=value.ref.attempt,
        prompt_token_ids=value.prompt_token_ids,
        sampling=sampling_to_proto(value.sampling),
        destination=None if value.destination is None else destination_to_proto(value.destination),
        answered=value.answered,
        cache_salt=value.cache_salt,
        adapter=value.adapter,
    )


def prefill_task_from_proto(message: worker_pb2.PrefillRequest) -> PrefillTask:
    """Convert a `PrefillTask` from protobuf."""
    return PrefillTask(
        router_id=message.router_id,
        ref=RequestRef(message.request_id, message.attempt),
        prompt_token_ids=tuple(message.prompt_token_ids),
        sampling=sampling_from_proto(message.sampling),
        destination=destination_from_proto(message.destination) if message.HasField("destination") else None,
        answered=message.answered,
        cache_salt=message.cache_salt,
        adapter=message.adapter,
    )
