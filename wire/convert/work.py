"""Between routers and workers: references, leases, reservations, tasks, events, loads."""

import math

from wire.convert.prefixes import prefix_changes_from_proto, prefix_changes_to_proto
from wire.convert.types import (
    edges_from_proto,
    edges_to_proto,
    error_from_proto,
    error_to_proto,
    finish_from_proto,
    finish_to_proto,
    sampling_from_proto,
    sampling_to_proto,
    transfer_from_proto,
    transfer_to_proto,
)
from wire.cost_parameters import UNMEASURED, CostParameters
from wire.generated.tandem.v1 import worker_pb2
from wire.messages import (
    Destination,
    GrantedLease,
    Lease,
    PeerRef,
    PrefillTask,
    RequestEvent,
    RequestRef,
    Reservation,
    StepEvents,
    StepTokens,
    TokenLogprobs,
    WorkerInspection,
    WorkerLoad,
)


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
        answered=value.answered,
        cache_salt=value.cache_salt,
        gap_target_s=value.gap_target_s if value.gap_target_s < math.inf else 0.0,
    )


def reservation_from_proto(message: worker_pb2.ReserveRequest) -> Reservation:
    return Reservation(
        router_id=message.router_id,
        ref=RequestRef(message.request_id, message.attempt),
        prompt_token_ids=tuple(message.prompt_token_ids),
        sampling=sampling_from_proto(message.sampling),
        prefill=PeerRef(message.prefill_worker_id, message.prefill_incarnation),
        answered=message.answered,
        cache_salt=message.cache_salt,
        gap_target_s=message.gap_target_s or math.inf,
    )


def granted_to_proto(value: GrantedLease) -> worker_pb2.ReserveResponse:
    return worker_pb2.ReserveResponse(
        lease=lease_to_proto(value.lease), duration_s=value.duration_s, held_tokens=value.held_tokens
    )


def granted_from_proto(message: worker_pb2.ReserveResponse) -> GrantedLease:
    return GrantedLease(lease_from_proto(message.lease), message.duration_s, message.held_tokens)


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
        answered=value.answered,
        cache_salt=value.cache_salt,
    )


def prefill_task_from_proto(message: worker_pb2.PrefillRequest) -> PrefillTask:
    return PrefillTask(
        router_id=message.router_id,
        ref=RequestRef(message.request_id, message.attempt),
        prompt_token_ids=tuple(message.prompt_token_ids),
        sampling=sampling_from_proto(message.sampling),
        destination=destination_from_proto(message.destination) if message.HasField("destination") else None,
        answered=message.answered,
        cache_salt=message.cache_salt,
    )


def token_logprobs_to_proto(value: TokenLogprobs) -> worker_pb2.TokenLogprobs:
    return worker_pb2.TokenLogprobs(chosen=value.chosen, top_ids=value.top_ids, top=value.top)


def token_logprobs_from_proto(message: worker_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(message.chosen, tuple(message.top_ids), tuple(message.top))


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
        logprobs=[token_logprobs_to_proto(each) for each in value.logprobs],
        cached_tokens=value.cached_tokens,
        preempted=value.preempted,
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
        logprobs=tuple(token_logprobs_from_proto(each) for each in message.logprobs),
        cached_tokens=message.cached_tokens,
        preempted=message.preempted,
    )


def cost_to_proto(value: CostParameters) -> worker_pb2.CostParameters:
    return worker_pb2.CostParameters(
        base_s=value.base_s,
        prompt_base_s=value.prompt_base_s,
        token_s=value.token_s,
        pair_s=value.pair_s,
        row_s=value.row_s,
        context_s=value.context_s,
        free_tokens=value.free_tokens,
        error=value.error,
        observed=value.observed,
    )


def cost_from_proto(message: worker_pb2.CostParameters) -> CostParameters:
    return CostParameters(
        base_s=message.base_s,
        prompt_base_s=message.prompt_base_s,
        token_s=message.token_s,
        pair_s=message.pair_s,
        row_s=message.row_s,
        context_s=message.context_s,
        free_tokens=message.free_tokens,
        error=message.error,
        observed=message.observed,
    )


def load_to_proto(value: WorkerLoad) -> worker_pb2.WorkerLoad:
    return worker_pb2.WorkerLoad(
        prefill_requests=value.prefill_requests,
        prefill_tokens=value.prefill_tokens,
        decode_requests=value.decode_requests,
        pages_used=value.pages_used,
        pages_total=value.pages_total,
        prefix_query_tokens=value.prefix_query_tokens,
        prefix_hit_tokens=value.prefix_hit_tokens,
        decode_context_tokens=value.decode_context_tokens,
        cost=cost_to_proto(value.cost),
        preemptions=value.preemptions,
    )


def load_from_proto(message: worker_pb2.WorkerLoad) -> WorkerLoad:
    return WorkerLoad(
        message.prefill_requests,
        message.prefill_tokens,
        message.decode_requests,
        message.pages_used,
        message.pages_total,
        message.prefix_query_tokens,
        message.prefix_hit_tokens,
        message.decode_context_tokens,
        cost_from_proto(message.cost) if message.HasField("cost") else UNMEASURED,
        message.preemptions,
    )


def step_tokens_to_proto(value: StepTokens) -> worker_pb2.StepTokens:
    return worker_pb2.StepTokens(
        request_ids=value.request_ids,
        attempts=value.attempts,
        indices=value.indices,
        token_ids=value.token_ids,
    )


def step_tokens_from_proto(message: worker_pb2.StepTokens) -> StepTokens:
    return StepTokens(
        tuple(message.request_ids), tuple(message.attempts), tuple(message.indices), tuple(message.token_ids)
    )


def step_events_to_proto(value: StepEvents) -> worker_pb2.StepEvents:
    return worker_pb2.StepEvents(
        step=value.step,
        events=[event_to_proto(e) for e in value.events],
        load=load_to_proto(value.load),
        prefixes=[prefix_changes_to_proto(each) for each in value.prefixes],
        tokens=[step_tokens_to_proto(each) for each in value.tokens],
    )


def step_events_from_proto(message: worker_pb2.StepEvents) -> StepEvents:
    return StepEvents(
        message.step,
        tuple(event_from_proto(e) for e in message.events),
        load_from_proto(message.load),
        tuple(prefix_changes_from_proto(each) for each in message.prefixes),
        tuple(step_tokens_from_proto(each) for each in message.tokens),
    )


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
        checksums_equal=value.checksums_equal,
        checksum_failures=value.checksum_failures,
        pages_cached=value.pages_cached,
        prefix_query_tokens=value.prefix_query_tokens,
        prefix_hit_tokens=value.prefix_hit_tokens,
        step_cost_error=value.step_cost_error,
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
        checksums_equal=message.checksums_equal,
        checksum_failures=message.checksum_failures,
        pages_cached=message.pages_cached,
        prefix_query_tokens=message.prefix_query_tokens,
        prefix_hit_tokens=message.prefix_hit_tokens,
        step_cost_error=message.step_cost_error,
    )
