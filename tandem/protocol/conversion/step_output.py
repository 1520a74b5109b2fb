"""Converts the step outputs that workers stream to routers; a defective event must not end the stream.

Token columns are converted field by field, because every token passes here: `to_proto` and `from_proto` take some 2 µs
more per message.
"""

import logging

from tandem.logging.logs import about
from tandem.protocol.conversion.fields import from_proto, to_proto
from tandem.protocol.ending import failure_event
from tandem.protocol.errors import Internal
from tandem.protocol.generated.tandem.v1 import worker_pb2
from tandem.protocol.messages import RequestEvent, RequestRef, StepOutput, StepTokens, WorkerLoad
from tandem.protocol.prefixes import PrefixChanges

log = logging.getLogger(__name__)


def step_output_to_proto(value: StepOutput) -> worker_pb2.StepOutput:
    """Convert a `StepOutput` to protobuf; an event that cannot be converted is replaced by an error of its request."""
    unwritten: list[RequestEvent] = []
    tokens = [_tokens_to_proto(columns, unwritten) for columns in value.tokens]
    return worker_pb2.StepOutput(
        step=value.step,
        events=[_event_to_proto(event) for event in (*value.events, *unwritten)],
        load=to_proto(value.load, worker_pb2.WorkerLoad),
        prefixes=[to_proto(changes, worker_pb2.PrefixChanges) for changes in value.prefixes],
        tokens=[columns for columns in tokens if columns is not None],
    )


def step_output_from_proto(message: worker_pb2.StepOutput) -> StepOutput:
    """Convert a `StepOutput` from protobuf.

    An event that cannot be converted is replaced by an error of its request.
    """
    return StepOutput(
        message.step,
        tuple(_event_from_proto(event) for event in message.events),
        from_proto(message.load, WorkerLoad),
        tuple(from_proto(changes, PrefixChanges) for changes in message.prefixes),
        tuple(_tokens_from_proto(columns) for columns in message.tokens),
    )


def _event_to_proto(value: RequestEvent) -> worker_pb2.RequestEvent:
    try:
        return to_proto(value, worker_pb2.RequestEvent)
    except Exception:
        return to_proto(_failure(value.ref, "written"), worker_pb2.RequestEvent)


def _event_from_proto(message: worker_pb2.RequestEvent) -> RequestEvent:
    try:
        return from_proto(message, RequestEvent)
    except Exception:
        return _failure(from_proto(message.ref, RequestRef), "read")


def _tokens_to_proto(value: StepTokens, unwritten: list[RequestEvent]) -> worker_pb2.StepTokens | None:
    """Convert a `StepTokens`; if that fails, return None and append the same tokens as events to `unwritten`."""
    try:
        return worker_pb2.StepTokens(
            request_ids=value.request_ids,
            attempts=value.attempts,
            indices=value.indices,
            token_ids=value.token_ids,
            counts=value.counts,
        )
    except Exception:
        unwritten.extend(value.events())
        return None


def _tokens_from_proto(message: worker_pb2.StepTokens) -> StepTokens:
    return StepTokens(
        tuple(message.request_ids),
        tuple(message.attempts),
        tuple(message.indices),
        tuple(message.token_ids),
        tuple(message.counts),
    )


def _failure(ref: RequestRef, verb: str) -> RequestEvent:
    log.exception("an event of request %s could not be %s", ref.request_id, verb, extra=about(ref.request_id))
    return failure_event(ref, Internal(f"a worker's event of the request could not be {verb}; see the log"))
