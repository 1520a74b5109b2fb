"""Converts the traces of ended requests to and from protobuf and JSON."""

from collections.abc import Iterable

from google.protobuf import json_format

from tandem.protocol.conversion.types import timeline_from_proto, timeline_to_proto
from tandem.protocol.errors import Unavailable
from tandem.protocol.generated.tandem.v1 import inference_pb2
from tandem.protocol.lifecycle.request_trace import RequestTrace, TraceContext


def trace_to_proto(value: RequestTrace) -> inference_pb2.RequestTrace:
    """Convert a `RequestTrace` to protobuf."""
    return inference_pb2.RequestTrace(
        request_id=value.request_id,
        wire_id=value.wire_id,
        trace_id=value.context.trace_id,
        parent_id=value.context.parent_id,
        sampled=value.context.sampled,
        model=value.model,
        operation=value.operation,
        slo_class=value.slo_class,
        outcome=value.outcome,
        prompt_tokens=value.prompt_tokens,
        completion_tokens=value.completion_tokens,
        cached_tokens=value.cached_tokens,
        timeline=timeline_to_proto(value.timeline),
    )


def trace_from_proto(message: inference_pb2.RequestTrace) -> RequestTrace:
    """Convert a `RequestTrace` from protobuf."""
    return RequestTrace(
        request_id=message.request_id,
        wire_id=message.wire_id,
        context=TraceContext(message.trace_id, message.parent_id, message.sampled),
        model=message.model,
        operation=message.operation,
        slo_class=message.slo_class,
        outcome=message.outcome,
        prompt_tokens=message.prompt_tokens,
        completion_tokens=message.completion_tokens,
        cached_tokens=message.cached_tokens,
        timeline=timeline_from_proto(message.timeline),
    )


def traces_to_json(traces: Iterable[RequestTrace], kept: int) -> str:
    """Return the body of /traces; `kept` is the most traces of newest requests that the router keeps."""
    message = inference_pb2.RequestTraces(traces=[trace_to_proto(each) for each in traces], kept=kept)
    return json_format.MessageToJson(message, indent=1)


def traces_from_json(text: str) -> tuple[list[RequestTrace], int]:
    """Parse the body of /traces; raises Unavailable if it is not one."""
    message = inference_pb2.RequestTraces()
    try:
        json_format.Parse(text, message, ignore_unknown_fields=True)
    except json_format.ParseError as error:
        raise Unavailable(f"the router's traces cannot be read ({error}); is it of this version?") from error
    return [trace_from_proto(each) for each in message.traces], message.kept
