"""Applies what workers report about an attempt to the request's state and to the load of its workers."""

from __future__ import annotations

from router.requests.ends import RequestEnds
from router.requests.request import RoutedRequest
from tandem.protocol.errors import Internal, TandemError, Unavailable, from_code
from tandem.protocol.lifecycle.events import LifecycleEvent
from tandem.protocol.messages import FinishReason, RequestEvent, TokenLogprobs


def failed(event: RequestEvent) -> bool:
    """Return True if the event reports that the attempt has failed."""
    return event.finish_reason is FinishReason.ERROR or event.finish_reason is FinishReason.ABORT


class AttemptProgress:
    """Advances attempts by the events of their workers: prompt computed, handed over, preempted, generated or failed.

    The event stream, real or simulated, owns it, and passes only events of current attempts; all calls are on the event
    loop.
    """

    def __init__(self, ends: RequestEnds) -> None:
        self._ends = ends

    def note(self, request: RoutedRequest, event: RequestEvent, now: float) -> None:
        """Record everything in the event but its tokens and its error; call `requeue_if_preempted` at the end."""
        request.last_event_s = now
        if event.event_times or event.transfer is not None:
            self._note(request, event)
        if event.preempted:
            request.preempted_at = event.first_index
        if event.first_index == 0 and event.cached_tokens:
            request.cached_tokens, request.reloaded_tokens = event.cached_tokens, event.reloaded_tokens

    def fail(self, request: RoutedRequest, event: RequestEvent) -> None:
        """End the attempt with the event's error, unless the whole answer has been generated."""
        if not request.generated:
            self._ends.fail_attempt(request, _error(event))

    def add_tokens(
        self,
        request: RoutedRequest,
        first_index: int,
        token_ids: tuple[int, ...],
        now: float,
        *,
        logprobs: tuple[TokenLogprobs, ...] = (),
        finish: FinishReason | None = None,
    ) -> tuple[tuple[int, ...], tuple[TokenLogprobs, ...]]:
        """Add the tokens that begin at index `first_index`; return those that are next in order, with their logprobs.

        `finish` is not None if the answer ends with them. Raises Unavailable if a repeated token differs from the one
        already sent.
        """
        request.last_event_s = now
        assembler = request.assembler
        added = assembler.add(first_index, token_ids, logprobs)
        if finish is not None:
            assembler.finish_at(first_index + len(token_ids), finish)
        # The token at index `prior_output_tokens` is sampled by the prefill worker, so that the prompt is computed. A
        # later token comes from the decode worker, which must have admitted the request, even if that event is still to
        # come.
        if first_index == request.prior_output_tokens:
            assert request.prefill is not None
            request.prefill.state.prompt_computed(request.internal_id)
            request.first_token_s = request.first_token_s or now
        elif request.lease is not None:
            self._admitted(request)
        if assembler.finished is not None:
            request.last_token_s = now
            # Before the last tokens are detokenized, because the workers are free now.
            request.generated = True
            self._ends.release_load(request)
        return added

    def requeue_if_preempted(self, request: RoutedRequest, now: float) -> None:
        """Return a preempted request to the queue once all tokens of its attempt have arrived."""
        if request.preempted_at is not None and request.assembler.count >= request.preempted_at:
            request.waiting_since = now
            self._ends.requeue(request)

    def _note(self, request: RoutedRequest, event: RequestEvent) -> None:
        request.event_times.extend(event.event_times)
        if event.transfer is not None:
            request.transfer = event.transfer
            if request.decode is not None:
                request.decode.state.learn_transfer(event.transfer)
            self._handed_over(request)
        if any(stamp.event is LifecycleEvent.DECODE_ADMITTED for stamp in event.event_times):
            self._admitted(request)

    def _admitted(self, request: RoutedRequest) -> None:
        """Stop renewing the lease, and queue the held answers, because the decode worker has admitted the request."""
        request.lease = None
        if request.held:
            self._ends.release(request)
        if request.decode is not None:
            request.decode.drop_lease(request.internal_id)
        self._handed_over(request)

    def _handed_over(self, request: RoutedRequest) -> None:
        """Remove the prompt from the prefill worker's load if the attempt's first token has arrived."""
        if request.prefill is not None and request.assembler.count > request.prior_output_tokens:
            request.prefill.state.remove_prompt(request.internal_id)


def _error(event: RequestEvent) -> TandemError:
    if event.error is not None:
        return from_code(event.error.code, event.error.message, event.error.retry_after_s)
    if event.finish_reason is FinishReason.ABORT:
        return Unavailable("a worker aborted the request, as it does when it drains; send it again")
    return Internal("a worker failed without an error message; its log has the details")
