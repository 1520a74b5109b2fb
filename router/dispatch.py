"""One request's walk: queue, place, reserve on the decode worker, prefill, and its end, whatever the end is.

The request's queues, in order:
1. waiting: admitted, in the queue (binder.py) until a worker has room.
2. walking: Reserve and Prefill are on their way (walk.py), one short task a request.
3. placed: the workers have it; their events (stream.py) carry it on until it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Iterator

from router.answer import Answer, Ending
from router.answer_text import AnswerText, TokenText
from router.binder import Binder, book
from router.choices import Choices, choice_of
from router.config import RouterConfig
from router.foresight import Foresight
from router.metrics import RouterMetrics
from router.placement import Mode, Pair, Placement
from router.request import Admitted, RoutedRequest
from router.stream import EventStream
from router.sweeper import Sweeper
from router.walk import Walks
from router.worker_link import WorkerLink
from router.worker_pool import WorkerPool
from wire.errors import (
    DeadlineExceeded,
    InvalidArgument,
    RoleClosed,
    StaleEpoch,
    TandemError,
    TransferFailed,
    Unavailable,
)
from wire.logs import about
from wire.messages import FinishReason, Lease, StepEvents
from wire.timeline import Edge, EdgeStamp

log = logging.getLogger(__name__)

_RETRYABLE = (TransferFailed, StaleEpoch, Unavailable, DeadlineExceeded)
"""Failures of an attempt, not of the request: with other workers, or once more with these, it can succeed."""


class Dispatcher:
    """Owns every request in flight. Belongs to the event loop; `WorkerLink`s report to it (`LinkObserver`)."""

    def __init__(
        self,
        config: RouterConfig,
        placement: Placement,
        tokens: TokenText,
        on_readiness: Callable[[], None],
    ) -> None:
        """`tokens` turns token ids into text; `on_readiness` is called when `pool.ready` may have changed."""
        self._config = config
        self._tokens = tokens
        self._on_readiness = on_readiness
        self._live: dict[str, RoutedRequest] = {}
        self._by_client_id: dict[str, list[RoutedRequest]] = {}
        self._held = 0
        """Requests that wait for the first answer of theirs."""
        self._arrivals = 0
        self._pump_scheduled = False
        self._draining = False
        self._emptied = asyncio.Event()
        self._walks = Walks(config, self)
        self._events = EventStream(config, self)
        self._placement = placement
        self.pool = WorkerPool(config, self)
        self._binder = Binder(config, placement, self.pool.fleet, time.monotonic)
        self.foresight = Foresight()
        """How good placement's expectations are."""
        self.metrics = RouterMetrics(config)
        self.metrics.watch(lambda: self.running, lambda: self.waiting)
        self._sweeper = Sweeper(config, self, time.monotonic)

    # ---- what the doors call ----

    def submit(self, admitted: Admitted) -> Choices:
        """Queue a request and return its answers-to-be; refuses at once when nobody could serve it, the queue is full,
        or what its class promises cannot be held. The caller closes them.
        """
        try:
            return self._submit(admitted)
        except TandemError as error:
            self.metrics.refused(admitted.slo.name, error)
            raise

    def _submit(self, admitted: Admitted) -> Choices:
        if admitted.request_id in self._by_client_id:
            raise InvalidArgument("request_id", f"{admitted.request_id!r} is still running here; choose another id")
        if self._draining:
            raise self._leaving()
        if not self.pool.ready:
            raise self._nobody()
        requests = [self._new_request(choice_of(admitted, index)) for index in range(admitted.n)]
        first, *others = requests
        self._binder.enter(first.ticket, more=len(others), held=self._held)
        first.held = tuple(others)
        self._held += len(others)
        self._live |= {request.wire_id: request for request in requests}
        self._by_client_id[admitted.request_id] = requests
        self._schedule_pump()
        return Choices([request.answer for request in requests])

    def abort(self, request_id: str) -> bool:
        """End a running request by its client's id: its answer completes with finish reason `abort`."""
        requests = self._by_client_id.get(request_id, [])
        for request in requests[::-1]:
            self.finish(request, FinishReason.ABORT, "")
        return bool(requests)

    @property
    def waiting(self) -> int:
        return len(self._binder) + self._held

    @property
    def running(self) -> int:
        return len(self._live) - self.waiting

    async def drain(self, grace_s: float) -> None:
        """Take nothing new, let what runs end for `grace_s` seconds, then fail the rest."""
        self._draining = True
        if self._live and grace_s > 0:
            self._emptied.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._emptied.wait(), grace_s)
        for request in list(self._live.values()):
            self.fail(request, self._leaving())

    async def close(self) -> None:
        """Fail what still runs, abort it on the workers, and close every connection."""
        await self.drain(0.0)
        await self._sweeper.close()
        await self._walks.close()
        await self.pool.close()
        await self._events.close()

    # ---- ends of a request ----

    def finish(self, request: RoutedRequest, reason: FinishReason, matched_stop: str) -> None:
        """The answer is complete."""
        if request.ended:
            return
        if reason is FinishReason.ABORT:
            after = request.edges[-1].edge.name
            log.info("request %s cancelled after %s", request.wire_id, after, extra=about(request.wire_id))
        request.answer.finish(lambda: self._ending(request, reason, matched_stop))
        if request.generated and (record := request.placement_record()) is not None:
            self.foresight.record(record)
            self.metrics.placed(record)
        self._end(request)

    def fail(self, request: RoutedRequest, error: TandemError) -> None:
        """The answer ends with `error`."""
        if request.ended:
            return
        log.info("request %s failed: %s", request.wire_id, error.message, extra=about(request.wire_id))
        request.answer.fail(error)
        self.metrics.failed(request, error)
        self._end(request)

    def fail_attempt(self, request: RoutedRequest, error: TandemError, *, retry: bool | None = None) -> None:
        """An attempt failed: try again if tries are left and it can help (`retry`; None = as the error's kind says),
        else the request fails. A worker that changes its role or drains is nobody's failure.
        """
        request.failures += not isinstance(error, RoleClosed)
        retry = isinstance(error, _RETRYABLE) if retry is None else retry
        if not retry or request.failures >= self._config.max_attempts:
            self.fail(request, error)
            return
        failed = "request %s, attempt %d failed, again: %s"
        log.info(failed, request.wire_id, request.attempt, error.message, extra=about(request.wire_id))
        request.waiting_since = time.monotonic()
        self.metrics.retried()
        self.requeue(request)

    def _end(self, request: RoutedRequest) -> None:
        request.ended = True
        self._binder.leave(request.ticket)
        self._binder.ended(request.ticket, request.assembler.count)
        del self._live[request.wire_id]
        if all(each.ended for each in self._by_client_id[request.admitted.request_id]):
            del self._by_client_id[request.admitted.request_id]
        if not self._live:
            self._emptied.set()
        self._leave_workers(request)
        self.release(request)

    def release(self, request: RoutedRequest) -> None:
        """Its prompt is cached where it can be, or it is over: the other answers begin, in its place in the queue."""
        held, request.held = request.held, ()
        self._held -= len(held)
        for each in held:
            if not each.ended:
                each.waiting_since = time.monotonic()
                each.ticket.start_by_s, each.ticket.slo = request.ticket.start_by_s, request.ticket.slo
                self._binder.enter_again(each.ticket)
                self._schedule_pump()

    def requeue(self, request: RoutedRequest) -> None:
        """Back to its place in the queue, for another attempt: it goes on behind the tokens that are out already."""
        self._leave_workers(request)
        request.attempt += 1
        request.preempted_at = None
        request.assembler.restart()
        request.ticket.resumed = request.assembler.count > 0
        self._binder.enter_again(request.ticket)
        self._schedule_pump()

    def _leave_workers(self, request: RoutedRequest) -> None:
        """Free the books, and let the workers forget the attempt unless they have finished it."""
        ref = request.ref
        for link in {link for link in (request.prefill, request.decode) if link is not None}:
            if not request.generated:
                link.abort(ref)
        self.settle(request)
        request.prefill = request.decode = None
        self._schedule_pump()

    def settle(self, request: RoutedRequest) -> None:
        """No worker computes for this attempt any more: their room is free."""
        if request.prefill is not None:
            request.prefill.books.unbook_prefill(request.wire_id)
        if request.decode is not None:
            request.decode.unbook_decode(request.wire_id)

    # ---- queue and placement ----

    def _schedule_pump(self) -> None:
        if not self._pump_scheduled and len(self._binder):
            self._pump_scheduled = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        """Bind requests to workers as long as the next one finds room."""
        self._pump_scheduled = False
        if not self.pool.staffed:
            for request in list(self.waiting_requests()):
                self.fail(request, self._nobody())
        while (ticket := self._binder.head()) is not None:
            request = self._live[ticket.wire_id]
            # Not before now: the largest prefill worker may have died while the request waited.
            room = max(0, self.pool.prefill_room - ticket.prompt_tokens)
            ticket.answered = min(request.assembler.count, room)
            pair = self._binder.bind(ticket)
            if pair is None:
                return
            self._place(request, pair)

    def _place(self, request: RoutedRequest, pair: Pair) -> None:
        request.edges.append(EdgeStamp.now(Edge.PLACED))
        request.last_heard = request.placed_s = time.monotonic()
        request.first_token_s = 0.0
        request.forecast = pair.forecast
        request.pace.target_s = self._gap_target(request, pair)
        request.prefill = self.pool.link(pair.prefill)
        request.decode = None if pair.decode is None else self.pool.link(pair.decode)
        request.prefill_worker = pair.prefill.worker_id
        request.decode_worker = "" if pair.decode is None else pair.decode.worker_id
        book(request.ticket, pair, request.prefill.books, None if request.decode is None else request.decode.books)
        self._walks.start(request)

    def _gap_target(self, request: RoutedRequest, pair: Pair) -> float:
        """What its class promises between tokens on these workers, in seconds."""
        books = self.pool.link(pair.decode or pair.prefill).books
        return request.admitted.slo.gap_target(books.idle_step_s)

    def waiting_requests(self) -> Iterator[RoutedRequest]:
        """Those in the queue."""
        return (self._live[ticket.wire_id] for ticket in self._binder)

    def live_requests(self) -> Iterable[RoutedRequest]:
        """All of them."""
        return self._live.values()

    def swept(self) -> None:
        """As load reports grow old, waiting requests may have a place."""
        self.pool.sweep()
        self._schedule_pump()

    # ---- what links report ----

    def on_step(self, _link: WorkerLink, step: StepEvents) -> None:
        self._events.take(step, self._live)
        self._schedule_pump()

    def on_lost(self, link: WorkerLink) -> None:
        lost = Unavailable(
            f"{link.name} went away while it served the request; send it again",
            retry_after_s=self._config.retry_after_s,
        )
        elsewhere = self.pool.staffed
        for request_id in link.request_ids:
            request = self._live.get(request_id)
            if request is not None:
                self.fail_attempt(request, lost, retry=elsewhere)

    def on_lease_lost(self, link: WorkerLink, lease: Lease) -> None:
        request = self._live.get(lease.request_id)
        if request is not None and request.lease == lease and request.decode is link:
            self.fail_attempt(request, StaleEpoch(f"{link.name} dropped the lease before the transfer was complete"))

    def on_mode(self, mode: str) -> None:
        try:
            self._placement.change_mode(Mode(mode))
        except ValueError:
            log.error("the controller asks for mode %r, which this router does not know: start both anew", mode)
        else:
            log.info("the cluster's mode is %s now", mode)

    def on_change(self) -> None:
        self._schedule_pump()
        self._on_readiness()

    # ---- small parts ----

    def _new_request(self, admitted: Admitted) -> RoutedRequest:
        self._arrivals += 1
        now, wire_id = time.monotonic(), f"{admitted.request_id}~{uuid.uuid4().hex[:12]}"
        request = RoutedRequest(
            wire_id=wire_id,
            admitted=admitted,
            ticket=admitted.ticket(wire_id, self._arrivals, now),
            text=AnswerText(self._tokens, admitted.stop),
            answer=Answer(admitted.request_id),
            waiting_since=now,
            edges=list(admitted.edges),
        )
        request.answer.connect(
            leave=lambda tokens: self._leave(request, tokens),
            close=lambda: self._close(request),
        )
        return request

    def _leave(self, request: RoutedRequest, tokens: int) -> None:
        """A piece of its answer is on its way to the client."""
        if tokens and not request.pace.tokens:
            request.edges.append(EdgeStamp.now(Edge.FIRST_TOKEN))
        self.metrics.tokens_leave(request, tokens)

    def _ending(self, request: RoutedRequest, reason: FinishReason, matched_stop: str) -> Ending:
        """The last message of its answer is on its way."""
        ending = request.ending(reason, matched_stop)
        self.metrics.finished(request, reason)
        return ending

    def _close(self, request: RoutedRequest) -> None:
        """Its reader is gone."""
        self.finish(request, FinishReason.ABORT, "")
        self.metrics.left(request)

    def _leaving(self) -> Unavailable:
        message = "the router is shutting down; send the request again"
        return Unavailable(message, retry_after_s=self._config.retry_after_s)

    def _nobody(self) -> Unavailable:
        missing = "decode" if any(view.prefills for view in self.pool.views()) else "prefill"
        message = f"no {missing} worker is serving now; try again in a moment"
        if self.pool.staffed:
            message = "; ".join(self.pool.not_ready)
        return Unavailable(message, retry_after_s=self._config.retry_after_s)
