"""How requests and their attempts end, and what follows from it: another attempt, or everything of theirs is let go."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from router.answer import Ending
from router.binder import Binder
from router.config import RouterConfig
from router.foresight import Foresight
from router.live_requests import LiveRequests
from router.metrics import RouterMetrics
from router.misfits import Misfits
from router.request import RoutedRequest
from wire.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    RoleClosed,
    StaleEpoch,
    TandemError,
    TransferFailed,
    Unavailable,
)
from wire.logs import about
from wire.messages import FinishReason
from wire.timeline import Edge, EdgeStamp

log = logging.getLogger(__name__)

_RETRYABLE = (TransferFailed, StaleEpoch, Unavailable, DeadlineExceeded)
"""Failures of an attempt, not of the request: with other workers, or once more with these, it can succeed."""


class RequestEnds:
    """The one place where a request stops: its answer, the queue, its workers and their books hear of it here."""

    def __init__(
        self,
        config: RouterConfig,
        live: LiveRequests,
        binder: Binder,
        *,
        misfits: Misfits,
        foresight: Foresight,
        metrics: RouterMetrics,
        pump: Callable[[], None],
        tell: Callable[[RoutedRequest, TandemError], None],
    ) -> None:
        """`pump` is called when a waiting request may have a place, `tell` to end an answer with an error, behind the
        tokens that are on their way.
        """
        self._config = config
        self._live = live
        self._binder = binder
        self._misfits = misfits
        self._foresight = foresight
        self._metrics = metrics
        self._pump = pump
        self._tell = tell

    def finish(self, request: RoutedRequest, reason: FinishReason, matched_stop: str) -> None:
        """The answer is complete."""
        if request.ended:
            return
        if reason is FinishReason.ABORT:
            after = request.edges[-1].edge.name
            log.info("request %s cancelled after %s", request.wire_id, after, extra=about(request.wire_id))
        request.answer.finish(lambda: self._ending(request, reason, matched_stop))
        if request.generated and (record := request.placement_record()) is not None:
            self._foresight.record(record)
            self._metrics.placed(record)
        self._end(request)

    def fail(self, request: RoutedRequest, error: TandemError) -> None:
        """The answer ends with `error`."""
        if request.ended:
            return
        log.info("request %s failed: %s", request.wire_id, error.message, extra=about(request.wire_id))
        self._tell(request, error)
        self._metrics.failed(request, error)
        self._end(request)

    def fail_attempt(self, request: RoutedRequest, error: TandemError, *, retry: bool | None = None) -> None:
        """An attempt failed: try again if tries are left and it can help (`retry`; None = as the error's kind says),
        else the request fails. A worker that changes its role or drains is nobody's failure.
        """
        failed = not isinstance(error, RoleClosed)
        request.failures += failed
        request.note_silence(time.monotonic())
        if isinstance(error, FailedPrecondition):
            error = self._part(request, error)
        retry = isinstance(error, _RETRYABLE) if retry is None else retry
        if not retry or request.failures >= self._config.max_attempts:
            self.fail(request, error)
            return
        attempt = request.wire_id, request.attempt, error.message
        log.info("request %s, attempt %d failed, again: %s", *attempt, extra=about(request.wire_id))
        request.waiting_since = time.monotonic()
        if failed:
            self._metrics.retried()
        self.requeue(request)

    def _part(self, request: RoutedRequest, error: FailedPrecondition) -> TandemError:
        """If its two workers do not fit together, no request shall be theirs; what the client hears if none fit."""
        prefill, decode = request.prefill, request.decode
        if prefill is None or decode is None or prefill is decode:
            return error
        log.warning("nothing goes from %s to %s any more: %s", prefill.name, decode.name, error.message)
        self._misfits.learn(prefill.info.peer, decode.info.peer, error.message)
        message = f"the workers that were tried do not fit together; {error.message}"
        return Unavailable(message, retry_after_s=self._config.retry_after_s)

    def _end(self, request: RoutedRequest) -> None:
        request.ended = True
        self._binder.leave(request.ticket)
        self._binder.ended(request.ticket, request.assembler.count)
        self._live.remove(request)
        self._leave_workers(request)
        self.release(request)

    def release(self, request: RoutedRequest) -> None:
        """Its prompt is cached where it can be, or it is over: the other answers begin, in its place in the queue."""
        for each in self._live.let_go(request):
            each.waiting_since = time.monotonic()
            each.ticket.start_by_s, each.ticket.slo = request.ticket.start_by_s, request.ticket.slo
            self._binder.enter_again(each.ticket)
            self._pump()

    def requeue(self, request: RoutedRequest, *, turned_away: bool = False) -> None:
        """Back to its place in the queue, for another attempt: it goes on behind the tokens that are out already.
        `turned_away` as in `Binder.enter_again`.
        """
        self._leave_workers(request)
        request.edges.append(EdgeStamp.now(Edge.REQUEUED))
        request.transfer = None
        request.attempt += 1
        request.preempted_at = None
        request.assembler.restart()
        request.ticket.resumed = request.assembler.count > 0
        self._binder.enter_again(request.ticket, turned_away=turned_away)
        self._pump()

    def _leave_workers(self, request: RoutedRequest) -> None:
        """Free the books, and let the workers forget the attempt unless they have finished it."""
        ref = request.ref
        for link in {link for link in (request.prefill, request.decode) if link is not None}:
            if not request.generated:
                link.abort(ref)
        self.settle(request)
        request.prefill = request.decode = None
        self._pump()

    def settle(self, request: RoutedRequest) -> None:
        """No worker computes for this attempt any more: their room is free."""
        if request.prefill is not None:
            request.prefill.books.unbook_prefill(request.wire_id)
        if request.decode is not None:
            request.decode.unbook_decode(request.wire_id)

    def _ending(self, request: RoutedRequest, reason: FinishReason, matched_stop: str) -> Ending:
        """The last message of its answer is on its way."""
        ending = request.ending(reason, matched_stop)
        self._metrics.finished(request, reason)
        return ending
