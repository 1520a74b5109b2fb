"""Converts load reports, step costs and inspections of workers."""

from tandem.protocol.cost_parameters import UNMEASURED, CostParameters
from tandem.protocol.generated.tandem.v1 import worker_pb2
from tandem.protocol.messages import PeerRef, WorkerInspection, WorkerLoad


def cost_to_proto(value: CostParameters) -> worker_pb2.CostParameters:
    """Convert a `CostParameters` to protobuf."""
    return worker_pb2.CostParameters(
        base_s=value.base_s,
        prompt_base_s=value.prompt_base_s,
        token_s=value.token_s,
        pair_s=value.pair_s,
        row_s=value.row_s,
        context_s=value.context_s,
        verify_base_s=value.verify_base_s,
        free_tokens=value.free_tokens,
        tile_tokens=value.tile_tokens,
        wave_tokens=value.wave_tokens,
        mixed_noise=value.mixed_noise,
        error=value.error,
        observed=value.observed,
    )


def cost_from_proto(message: worker_pb2.CostParameters) -> CostParameters:
    """Convert a `CostParameters` from protobuf."""
    return CostParameters(
        base_s=message.base_s,
        prompt_base_s=message.prompt_base_s,
        token_s=message.token_s,
        pair_s=message.pair_s,
        row_s=message.row_s,
        context_s=message.context_s,
        verify_base_s=message.verify_base_s,
        free_tokens=message.free_tokens,
        tile_tokens=max(1, message.tile_tokens),
        wave_tokens=max(1, message.wave_tokens),
        mixed_noise=message.mixed_noise or UNMEASURED.mixed_noise,
        error=message.error,
        observed=message.observed,
    )


def load_to_proto(value: WorkerLoad) -> worker_pb2.WorkerLoad:
    """Convert a `WorkerLoad` to protobuf."""
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
        decode_speedup=value.decode_speedup,
    )


def load_from_proto(message: worker_pb2.WorkerLoad) -> WorkerLoad:
    """Convert a `WorkerLoad` from protobuf."""
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
        message.decode_speedup or 1.0,
    )


def inspection_to_proto(value: WorkerInspection) -> worker_pb2.InspectResponse:
    """Convert a `WorkerInspection` to protobuf."""
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
        adapters_in_use=value.adapters_in_use,
    )


def inspection_from_proto(message: worker_pb2.InspectResponse) -> WorkerInspection:
    """Convert a `WorkerInspection` from protobuf."""
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
        adapters_in_use=tuple(message.adapters_in_use),
    )
