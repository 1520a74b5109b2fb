"""Converts the types shared by all services: sampling, finish reasons, errors, edges, timelines."""

from collections.abc import Iterable
from typing import cast

from tandem.protocol.generated.tandem.v1 import inference_pb2, types_pb2
from tandem.protocol.lifecycle.timeline import Edge, EdgeStamp, Timeline, TransferStats
from tandem.protocol.messages import ErrorDetail, FinishReason, SamplingParams


def sampling_to_proto(value: SamplingParams) -> types_pb2.SamplingParams:
    """Convert a `SamplingParams` to protobuf."""
    return types_pb2.SamplingParams(
        temperature=value.temperature,
        top_k=value.top_k,
        top_p=value.top_p,
        min_p=value.min_p,
        seed=value.seed,
        max_tokens=value.max_tokens,
        stop_token_ids=value.stop_token_ids,
        ignore_eos=value.ignore_eos,
        frequency_penalty=value.frequency_penalty,
        presence_penalty=value.presence_penalty,
        repetition_penalty=value.repetition_penalty,
        logprobs=value.logprobs,
        min_tokens=value.min_tokens,
        without_speculation=not value.speculate,
        grammar=value.grammar,
        prompt_logprobs=value.prompt_logprobs,
        logit_bias=dict(value.logit_bias),
    )


def sampling_from_proto(message: types_pb2.SamplingParams) -> SamplingParams:
    """Convert a `SamplingParams` from protobuf."""
    return SamplingParams(
        max_tokens=message.max_tokens,
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        seed=message.seed,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        frequency_penalty=message.frequency_penalty,
        presence_penalty=message.presence_penalty,
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        min_tokens=message.min_tokens,
        speculate=not message.without_speculation,
        grammar=message.grammar,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        logit_bias=tuple(sorted(message.logit_bias.items())),
    )


def finish_to_proto(value: FinishReason | None) -> types_pb2.FinishReason:
    """Convert a `FinishReason` to protobuf; None becomes FINISH_REASON_UNSPECIFIED."""
    return cast(types_pb2.FinishReason, value or 0)


def finish_from_proto(value: int) -> FinishReason | None:
    """Convert a `FinishReason` from protobuf; FINISH_REASON_UNSPECIFIED becomes None."""
    return FinishReason(value) if value else None


def error_to_proto(value: ErrorDetail) -> types_pb2.ErrorDetail:
    """Convert an `ErrorDetail` to protobuf."""
    return types_pb2.ErrorDetail(code=value.code, message=value.message, retry_after_s=value.retry_after_s)


def error_from_proto(message: types_pb2.ErrorDetail) -> ErrorDetail:
    """Convert an `ErrorDetail` from protobuf."""
    return ErrorDetail(message.code, message.message, message.retry_after_s)


def edges_to_proto(edges: Iterable[EdgeStamp]) -> list[types_pb2.EdgeStamp]:
    """Convert edge stamps to protobuf."""
    return [types_pb2.EdgeStamp(edge=cast(types_pb2.Edge, s.edge), unix_nanos=s.unix_nanos) for s in edges]


def edges_from_proto(messages: Iterable[types_pb2.EdgeStamp]) -> tuple[EdgeStamp, ...]:
    """Convert edge stamps from protobuf."""
    return tuple(EdgeStamp(Edge(m.edge), m.unix_nanos) for m in messages)


def transfer_to_proto(value: TransferStats) -> types_pb2.TransferStats:
    """Convert a `TransferStats` to protobuf."""
    return types_pb2.TransferStats(
        bytes=value.bytes, pages=value.pages, backend=value.backend, duration_nanos=value.duration_nanos
    )


def transfer_from_proto(message: types_pb2.TransferStats) -> TransferStats:
    """Convert a `TransferStats` from protobuf."""
    return TransferStats(message.bytes, message.pages, message.backend, message.duration_nanos)


def timeline_to_proto(value: Timeline) -> inference_pb2.Timeline:
    """Convert a `Timeline` to protobuf."""
    return inference_pb2.Timeline(
        edges=edges_to_proto(value.edges),
        transfer=None if value.transfer is None else transfer_to_proto(value.transfer),
        prefill_worker=value.prefill_worker,
        decode_worker=value.decode_worker,
    )


def timeline_from_proto(message: inference_pb2.Timeline) -> Timeline:
    """Convert a `Timeline` from protobuf."""
    return Timeline(
        edges=edges_from_proto(message.edges),
        transfer=transfer_from_proto(message.transfer) if message.HasField("transfer") else None,
        prefill_worker=message.prefill_worker,
        decode_worker=message.decode_worker,
    )
