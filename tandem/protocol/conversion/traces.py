"""Converts traces of ended requests to and from JSON, the body of /traces."""

from collections.abc import Iterable

from google.protobuf import json_format

from tandem.protocol.conversion.fields import from_proto, to_proto
from tandem.protocol.errors import Unavailable
from tandem.protocol.generated.tandem.v1 import inference_pb2
from tandem.protocol.lifecycle.request_trace import RequestTrace


def traces_to_json(traces: Iterable[RequestTrace], kept: int) -> str:
    """Return the body of /traces; `kept` is the maximum number of ended requests of which the router keeps traces."""
    messages = [to_proto(trace, inference_pb2.RequestTrace) for trace in traces]
    return json_format.MessageToJson(inference_pb2.RequestTraces(traces=messages, kept=kept), indent=1)


def traces_from_json(text: str) -> tuple[list[RequestTrace], int]:
    """Parse the body of /traces: the traces, and the maximum number that the router keeps.

    Raises Unavailable for any other text.
    """
    message = inference_pb2.RequestTraces()
    try:
        json_format.Parse(text, message, ignore_unknown_fields=True)
    except json_format.ParseError as error:
        raise Unavailable(f"the router's traces cannot be read ({error}); is it of this version?") from error
    return [from_proto(trace, RequestTrace) for trace in message.traces], message.kept
