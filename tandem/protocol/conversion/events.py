"""Converts the step outputs that workers send to routers."""

import logging

from tandem.logging.logs import about
from tandem.protocol.conversion.load import load_from_proto, load_to_proto
from tandem.protocol.conversion.prefixes import prefix_changes_from_proto, prefix_changes_to_proto
from tandem.protocol.conversion.types import (
    edges_from_proto,
    edges_to_proto,
    error_from_proto,
    error_to_proto,
    finish_from_proto,
    finish_to_proto,
    transfer_from_proto,
    transfer_to_proto,
)
from tandem.protocol.ending import failure_event
from tandem.protocol.errors import Internal
from tandem.protocol.generated.tandem.v1 import worker_pb2
from tandem.protocol.messages import PromptLogprobs, RequestEvent, RequestRef, StepEvents, StepTokens, TokenLogprobs

log = logging.getLogger(__name__)


def token_logprobs_to_proto(value: TokenLogprobs) -> worker_pb2.TokenLogprobs:
    """Convert a `TokenLogprobs` to protobuf."""
    return worker_pb2.TokenLogprobs(chosen=value.chosen, top_ids=value.top_ids, top=value.top)


def token_logprobs_from_proto(message: worker_pb2.TokenLogprobs) -> TokenLogprobs:
    """Convert a `TokenLogprobs` from protobuf."""
    return TokenLogprobs(message.chosen, tuple(message.top_ids), tuple(message.top))


def prompt_logprobs_to_proto(value: PromptLogprobs) -> worker_pb2.PromptLogprobs:
    """Convert a `PromptLogprobs` to protobuf."""
    return worker_pb2.PromptLogprobs(
        chosen=value.chosen, top_count=value.top_count, top_ids=value.top_ids, top=value.top
    )


def prompt_logprobs_from_proto(message: worker_pb2.PromptLogprobs) -> PromptLogprobs:
    """Convert a `PromptLogprobs` from protobuf."""
    return PromptLogprobs(tuple(message.chosen), message.top_count, tuple(message.top_ids), tuple(message.top))


def event_to_proto(value: RequestEvent) -> worker_pb2.RequestEvent:
    """Convert a `RequestEvent` to protobuf."""
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
        prompt_logprobs=None if value.prompt_logprobs is None else prompt_logprobs_to_proto(value.prompt_logprobs),
    )


def event_from_proto(message: worker_pb2.RequestEvent) -> RequestEvent:
    """Convert a `RequestEvent` from protobuf."""
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
        prompt_logprobs=(
            prompt_logprobs_from_proto(message.prompt_logprobs) if message.HasField("prompt_logprobs") else None
        ),
    )


def step_tokens_to_proto(value: StepTokens) -> worker_pb2.StepTokens:
    """Convert a `StepTokens` to protobuf."""
    return worker_pb2.StepTokens(
        request_ids=value.request_ids,
        attempts=value.attempts,
        indices=value.indices,
        token_ids=value.token_ids,
        counts=value.counts,
    )


def step_tokens_from_proto(message: worker_pb2.StepTokens) -> StepTokens:
    """Convert a `StepTokens` from protobuf."""
    return StepTokens(
        tuple(message.request_ids),
        tuple(message.attempts),
        tuple(message.indices),
        tuple(message.token_ids),
        tuple(message.counts),
    )


def step_events_to_proto(value: StepEvents) -> worker_pb2.StepEvents:
    """Convert a `StepEvents` to protobuf; an event that fails to convert becomes the failure of its request alone."""
    unwritten: list[RequestEvent] = []
    tokens = [_tokens_to_proto(each, unwritten) for each in value.tokens]
    return worker_pb2.StepEvents(
        step=value.step,
        events=[_event_or_failure_to_proto(e) for e in (*value.events, *unwritten)],
        load=load_to_proto(value.load),
        prefixes=[prefix_changes_to_proto(each) for each in value.prefixes],
        tokens=[each for each in tokens if each is not None],
    )


def step_events_from_proto(message: worker_pb2.StepEvents) -> StepEvents:
    """Convert a `StepEvents` from protobuf; an event that fails to convert becomes the failure of its request alone."""
    return StepEvents(
        message.step,
        tuple(_event_or_failure_from_proto(e) for e in message.events),
        load_from_proto(message.load),
        tuple(prefix_changes_from_proto(each) for each in message.prefixes),
        tuple(step_tokens_from_proto(each) for each in message.tokens),
    )


def _event_or_failure_to_proto(value: RequestEvent) -> worker_pb2.RequestEvent:
    try:
        return event_to_proto(value)
    except Exception:
        return event_to_proto(_failure(value.ref, "written"))


def _event_or_failure_from_proto(message: worker_pb2.RequestEvent) -> RequestEvent:
    try:
        return event_from_proto(message)
    except Exception:
        return _failure(RequestRef(message.request_id, message.attempt), "read")


def _tokens_to_proto(value: StepTokens, unwritten: list[RequestEvent]) -> worker_pb2.StepTokens | None:
    """Convert a `StepTokens`; if that fails, return None and append its events to `unwritten`."""
    try:
        return step_tokens_to_proto(value)
    except Exception:
        unwritten.extend(value.events())
        return None


def _failure(ref: RequestRef, verb: str) -> RequestEvent:
    log.exception("an event of request %s could not be %s", ref.request_id, verb, extra=about(ref.request_id))
    return failure_event(ref, Internal(f"a worker's event of the request could not be {verb}; see the log"))
