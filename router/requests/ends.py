"""The end of a request or of one attempt: the attempt is retried, or all resources of the request are released.

Everything that can end a request calls `RequestEnds`: the answer's end, errors, lost workers, timeouts and the client.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from router.config import RouterConfig
from router.observability.prediction_quality import PredictionQuality
from router.placement.fleet import IncompatiblePairs
from router.placement.scheduler import RequestScheduler
from router.placement.worker_state import Clock
from router.requests.answer import AnswerEnd
from router.requests.live_requests import LiveRequests
from router.requests.metrics import RouterMetrics
from router.requests.request import RoutedRequest
from tandem.logging.logs import about
from tandem.protocol.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    RoleClosed,
    StaleEpoch,
    TandemError,
    TransferFailed,
    Unavailable,
)
from tandem.protocol.lifecycle.events import EventTime, LifecycleEvent
from tandem.protocol.messages import FinishReason

log = logging.getLogger(__name__)

_RETRYABLE = (TransferFailed, StaleEpoch, Unavailable, DeadlineExceeded)
"""Errors of an attempt after which a retry may succeed, on the same workers or on others."""


class RequestEnds:
    """Ends requests: completes the answer, and removes the request from the queue and from its workers.

    The dispatcher owns it; all calls come on the event loop.
    """

    def __init__(
        self,
        config: RouterConfig,
        live: LiveRequests,
        scheduler: RequestScheduler,
        *,
        clock: Clock,
        incompatible: IncompatiblePairs,
        prediction_quality: PredictionQuality,
        metrics: RouterMetrics,
        pump: Callable[[], None],
        send_error: Callable[[RoutedRequest, TandemError], None],
        forget: Callable[[RoutedRequest], None],
    ) -> None:
        """Set the callbacks.

        `pump` is called when a waiting request may fit on a worker, `send_error` to end an answer with an error after
        the tokens that are in the text thread, and `forget` when a request has ended for any reason.
        """
        self._config = config
        self._live = live
        self._scheduler = scheduler
        self._clock = clock
        self._incompatible = incompatible
        self._prediction_quality = prediction_quality
        self._metrics = metrics
        self._pump = pump
        self._send_error = send_error
        self._forget = forget

    def finish(self, request: RoutedRequest, reason: FinishReason, matched_stop: str) -> None:
        """Complete the answer with `reason`; does nothing if the request has already ended."""
        if request.ended:
            return
        if reason is FinishReason.ABORT:
            after = request.event_times[-1].event.name
            log.info("request %s cancelled after %s", request.internal_id, after, extra=about(request.internal_id))
        request.answer.finish(lambda: self._ending(request, reason, matched_stop))
        if request.generated and (record := request.placement_record()) is not None:
            self._prediction_quality.record(record)
            self._metrics.placed(record)
        self._end(request)

    def fail(self, request: RoutedRequest, error: TandemError) -> None:
        """End the answer with `error`; does nothing if the request has already ended.

        A worker's error about the grammar is replaced by one that names the field of the client's request.
        """
        if request.ended:
            return
        if isinstance(error, InvalidArgument) and error.field == "grammar" and request.admitted.format_field:
            error = InvalidArgument(request.admitted.format_field, error.problem)
        log.info("request %s failed: %s", request.internal_id, error.message, extra=about(request.internal_id))
        self._send_error(request, error)
        self._metrics.failed(request, error)
        self._end(request)

    def fail_attempt(self, request: RoutedRequest, error: TandemError, *, retry: bool | None = None) -> None:
        """End a failed attempt: retry the request if the error allows it and attempts are left, else fail the request.

        `retry` is True if the error allows a retry; None decides by the error's type. An attempt that ended because a
        worker changes its role or drains does not count as a failure.
        """
        failed = not isinstance(error, RoleClosed)
        request.failures += failed
        request.note_silence(self._clock())
        if isinstance(error, FailedPrecondition):
            error = self._exclude_pair(request, error)
        retry = isinstance(error, _RETRYABLE) if retry is None else retry
        if not retry or request.failures >= self._config.max_attempts:
            self.fail(request, error)
            return
        attempt = request.internal_id, request.attempt, error.message
        log.info("request %s, attempt %d failed, retrying: %s", *attempt, extra=about(request.internal_id))
        request.waiting_since = self._clock()
        if failed:
            self._metrics.retried()
        self.requeue(request)

    def fail_internal(self, request: RoutedRequest, error: Exception) -> None:
        """Fail a request with Internal after an unexpected exception in the code that processes it.

        The answer fails at once, because some of its tokens may be lost; other requests are not affected. Never raises:
        each cleanup step runs even if an earlier one failed.
        """
        log.error("internal error in request %s", request.internal_id, exc_info=error, extra=about(request.internal_id))
        reason = Internal("the router could not go on with this request; its log has the details")
        if not request.answer.over:
            request.answer.fail(reason)
        if request.internal_id not in self._live:
            return
        request.ended = True
        steps: tuple[Callable[[], None], ...] = (
            lambda: self._metrics.failed(request, reason),
            lambda: self._scheduler.queue.remove(request.queued),
            lambda: self._live.remove(request),
            lambda: self._forget(request),
            lambda: self._leave_workers(request),
            lambda: self.release(request),
        )
        for step in steps:
            try:
                step()
            except Exception:
                log.exception("cleanup failed for request %s", request.internal_id, extra=about(request.internal_id))

    def _exclude_pair(self, request: RoutedRequest, error: FailedPrecondition) -> TandemError:
        """Exclude the request's pair of incompatible workers from placement, and return the error for the client."""
        prefill, decode = request.prefill, request.decode
        if prefill is None or decode is None or prefill is decode:
            return error
        log.warning("transfers from %s to %s are excluded: %s", prefill.name, decode.name, error.message)
        self._incompatible.learn(prefill.info.peer, decode.info.peer, error.message)
        message = f"the chosen workers are incompatible; {error.message}"
        return Unavailable(message, retry_after_s=self._config.retry_after_s)

    def _end(self, request: RoutedRequest) -> None:
        request.ended = True
        self._scheduler.queue.remove(request.queued)
        self._scheduler.ended(request.queued, request.assembler.count)
        self._live.remove(request)
        self._forget(request)
        self._leave_workers(request)
        self.release(request)

    def release(self, request: RoutedRequest) -> None:
        """Queue the other answers to the prompt of `request`, which have been held until now."""
        for held_request in self._live.release_held(request):
            held_request.waiting_since = self._clock()
            held_request.queued.start_by_s, held_request.queued.slo = request.queued.start_by_s, request.queued.slo
            self._scheduler.queue.push(held_request.queued)
            self._pump()

    def preempt(self, request: RoutedRequest) -> None:
        """Preempt a running answer and return it to the queue, because another tenant needs its decode slot."""
        log.info("request %s gives its slot to another tenant", request.internal_id, extra=about(request.internal_id))
        request.waiting_since = self._clock()
        self.requeue(request, yielded=True)

    def requeue(self, request: RoutedRequest, *, yielded: bool = False) -> None:
        """Return the request to the queue for another attempt, which continues after the tokens in order so far.

        `yielded` sets `QueuedRequest.yielded`, which also stays True if the attempt that follows a preemption ends
        without a new token.
        """
        yielded |= request.queued.yielded and request.assembler.count == request.prior_output_tokens
        self._leave_workers(request)
        request.event_times.append(EventTime.now(LifecycleEvent.REQUEUED))
        # Events of the old attempt may still arrive; the new number makes the stream drop them as stale.
        request.transfer = None
        request.attempt += 1
        request.preempted_at = None
        request.assembler.restart()
        request.queued.resumed, request.queued.yielded = request.assembler.count > 0, yielded
        self._scheduler.queue.push(request.queued)
        self._pump()

    def _leave_workers(self, request: RoutedRequest) -> None:
        """Remove the attempt from its workers' load; abort it on the workers unless the whole answer is generated."""
        ref = request.ref
        # A set, because prefill and decode worker may be the same.
        for link in {link for link in (request.prefill, request.decode) if link is not None}:
            if not request.generated:
                link.abort(ref)
        self.release_load(request)
        request.prefill = request.decode = None
        self._pump()

    def release_load(self, request: RoutedRequest) -> None:
        """Remove the attempt from its workers' load as placement sees it, and stop renewing its lease."""
        if request.prefill is not None:
            request.prefill.state.remove_prompt(request.internal_id)
        if request.decode is not None:
            request.decode.drop_lease(request.internal_id)
            request.decode.state.remove_answer(request.internal_id)

    def _ending(self, request: RoutedRequest, reason: FinishReason, matched_stop: str) -> AnswerEnd:
        """Return the ending for the client, and count the request as finished."""
        ending = request.ending(reason, matched_stop)
        self._metrics.finished(request, reason)
        return ending
