"""Creates the events of tokens that may end an answer, or that carry more than their ids."""

import logging
from collections.abc import Sequence

from decode_worker.batch_snapshot import DecodedStep
from decode_worker.running_batch import RunningBatch
from tandem.engine.steps.sampling_metadata import NO_TOKEN
from tandem.logging.logs import about
from tandem.protocol.ending import failure_event
from tandem.protocol.errors import Internal, InvalidArgument, NonFiniteLogits, TandemError
from tandem.protocol.messages import RequestEvent, RoutedEvent, TokenLogprobs

log = logging.getLogger(__name__)

Scores = Sequence[TokenLogprobs | None]
"""Log probabilities of tokens; None where the request does not want them."""


def event_or_failure(batch: RunningBatch, step: DecodedStep, row: int, scores: Scores) -> RoutedEvent:
    """Return the event of a row's tokens, or a failure event if an error occurs for this request.

    Only this request fails. A request that ends is dropped from `batch`.
    """
    try:
        return _event_for(batch, step, row, scores)
    except Exception as error:
        request = step.tokens(row)[0]
        reservation = request.reservation
        ref = reservation.ref
        if isinstance(error, InvalidArgument | NonFiniteLogits):
            reason: TandemError = error
        else:
            reason = Internal("a token of the request could not be handled; see the worker's log")
            log.exception("request %s met a defect", ref.request_id, extra=about(ref.request_id))
        request.ended = request.failed = True
        batch.drop(request)
        return RoutedEvent(reservation.router_id, failure_event(ref, reason))


def _event_for(batch: RunningBatch, step: DecodedStep, row: int, scores: Scores) -> RoutedEvent:
    request, index, token_ids = step.tokens(row)
    if request.history is not None and request.history.failure is not None:
        raise request.history.failure
    if token_ids[-1] == NO_TOKEN:
        raise NonFiniteLogits
    event_times, request.event_times = tuple(request.event_times), []
    reason = request.ending.reason(token_ids[-1], index + len(token_ids) - 1)
    if reason is not None:
        request.ended = True
        batch.drop(request)
    batch.event_sent(request)
    reservation = request.reservation
    logprobs = tuple(score for score in scores if score is not None)
    event = RequestEvent(reservation.ref, index, tuple(token_ids), reason, event_times=event_times, logprobs=logprobs)
    return RoutedEvent(reservation.router_id, event)
