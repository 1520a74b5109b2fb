"""Turns the step events of workers into the client's answer: orders the tokens, detokenizes them, and ends the answer.

Tokens are sent at once while all answers together stay within a budget of chunks per second; the budget keeps the CPU
free for an engine on the same machine. Above the budget a chunk contains the tokens of several steps, except for
answers that would miss their ITL target because of the delay.
"""

from __future__ import annotations

import asyncio
import math
import time
from itertools import chain

from router.config import RouterConfig
from router.requests.attempt_progress import AttemptProgress, failed
from router.requests.chunk_budget import ChunkBudget, must_not_wait
from router.requests.ends import RequestEnds
from router.requests.first_token import first_token_hold_s
from router.requests.live_requests import LiveRequests
from router.requests.request import RoutedRequest
from router.requests.text_thread import RequestText, TextThread
from tandem.protocol.errors import Internal, TandemError, Unavailable
from tandem.protocol.messages import FinishReason, RequestEvent, StepOutput, TokenLogprobs


class EventStream:
    """Processes the events that prefill and decode workers report about requests.

    The dispatcher owns it; all calls come on the event loop. It owns the text thread, which detokenizes.
    """

    def __init__(self, config: RouterConfig, ends: RequestEnds) -> None:
        self._ends = ends
        self._progress = AttemptProgress(ends)
        self._text = TextThread(self._deliver)
        self._jobs: dict[str, RequestText] = {}
        self._budget = ChunkBudget(config.chunk_rate, config.chunk_delay_max_s)
        self._timer: asyncio.TimerHandle | None = None
        self._held: dict[str, RequestText] = {}
        """First tokens that are held, to be sent together with the second token, by internal id."""
        self.stale = 0
        """Number of dropped events and token rows that belonged to ended requests or attempts."""

    async def close(self) -> None:
        """Stop the text thread."""
        if self._timer is not None:
            self._timer.cancel()
        await self._text.stop()

    def take(self, step: StepOutput, live: LiveRequests) -> None:
        """Process one step output of a worker.

        Events of ended requests and of earlier attempts are dropped. An exception while an event is processed fails
        only the event's request.
        """
        now = time.monotonic()
        urgent: list[RequestText] = []
        for event in step.events:
            request = live.current(event.ref.request_id, event.ref.attempt)
            if request is None:
                self.stale += 1
                continue
            try:
                self._take_event(request, event, urgent, now)
            except Exception as error:
                self._fail_internally(request, error)
        # Most tokens arrive as plain rows, because one event object per token would cost more than everything else.
        # The fast path: if a job of the request already waits to be sent, a row of next tokens is added to that job.
        for request_id, attempt, first_index, token_ids in chain.from_iterable(batch.rows() for batch in step.tokens):
            job = self._jobs.get(request_id)
            if job is not None and job.request.only_continues_at(attempt, first_index):
                job.token_ids += job.request.assembler.extend(token_ids)
                job.request.last_event_s = now
                continue
            request = live.current(request_id, attempt)
            if request is None:
                self.stale += 1
                continue
            try:
                self._take_tokens(request, first_index, token_ids, urgent, now)
            except Exception as error:
                self._fail_internally(request, error)
        self._send(urgent, now)
        if self._jobs:
            self._flush_when_due(now)

    def _take_event(self, request: RoutedRequest, event: RequestEvent, urgent: list[RequestText], now: float) -> None:
        """Process one event of a request.

        `urgent` collects text that must be sent without waiting for a batch. It is sent before an error is reported, so
        that the client gets the tokens that precede the error.
        """
        self._progress.note(request, event, now)
        if event.prompt_logprobs is not None:
            request.answer.prompt_logprobs = event.prompt_logprobs
        if failed(event):
            self._send(urgent, now)  # the last tokens of this request may be among them
            self._progress.fail(request, event)
        elif event.token_ids or event.finish_reason is not None:
            scores, finish = event.logprobs, event.finish_reason
            self._take_tokens(request, event.first_index, event.token_ids, urgent, now, logprobs=scores, finish=finish)
            return
        self._progress.requeue_if_preempted(request, now)

    def _take_tokens(
        self,
        request: RoutedRequest,
        first_index: int,
        token_ids: tuple[int, ...],
        urgent: list[RequestText],
        now: float,
        *,
        logprobs: tuple[TokenLogprobs, ...] = (),
        finish: FinishReason | None = None,
    ) -> None:
        """Process the tokens that begin at index `first_index`; `finish` is not None if the answer ends with them."""
        first = request.assembler.count == 0
        try:
            fresh, scores = self._progress.add_tokens(
                request, first_index, token_ids, now, logprobs=logprobs, finish=finish
            )
        except Unavailable as error:
            self._send(urgent, now)
            self._ends.fail(request, error)
            return
        if self._add_text(request, fresh, scores, now, first=first):
            urgent.append(self._jobs.pop(request.internal_id))
        self._progress.requeue_if_preempted(request, now)

    def _fail_internally(self, request: RoutedRequest, error: Exception) -> None:
        self.forget(request)
        self._ends.fail_internal(request, error)

    def forget(self, request: RoutedRequest) -> None:
        """Drop the unsent tokens of a request that has ended."""
        self._jobs.pop(request.internal_id, None)
        self._held.pop(request.internal_id, None)

    def fail(self, request: RoutedRequest, error: TandemError) -> None:
        """End the answer with `error`, after all tokens in order have been delivered."""
        if not request.assembler.count or request.answer.over:
            request.answer.fail(error)
            return
        internal_id = request.internal_id
        job = self._held.pop(internal_id, None) or self._jobs.pop(internal_id, None) or RequestText(request=request)
        job.error = error
        self._text.submit([job])

    def _send(self, urgent: list[RequestText], now: float) -> None:
        if urgent:
            self._budget.spend(now, len(urgent))
            self._text.submit(urgent.copy())
            urgent.clear()

    def _add_text(
        self,
        request: RoutedRequest,
        fresh: tuple[int, ...],
        scores: tuple[TokenLogprobs, ...],
        now: float,
        *,
        first: bool,
    ) -> bool:
        """Add tokens that are next in order to the request's text; return True if the text must be sent at once.

        `first` is True if they begin the answer.
        """
        finished = request.assembler.finished
        if not fresh and finished is None:
            return False
        held = self._held.pop(request.internal_id, None)
        job = held or self._jobs.get(request.internal_id) or RequestText(request=request)
        job.token_ids.extend(fresh)
        job.logprobs.extend(scores)
        job.finish = finished
        if first and len(fresh) == 1 and finished is None and self._hold(job, now):
            return False
        self._jobs[request.internal_id] = job
        return first or held is not None or finished is not None or self._delay_breaks_target(request)

    def _delay_breaks_target(self, request: RoutedRequest) -> bool:
        """Return True if a delay of the tokens would miss an ITL target that placement predicted to be met.

        The delay is added to the predicted step time, or to the current step time if that is longer.
        """
        slo, prediction, decode = request.queued.slo, request.prediction, request.decode
        if prediction is None or decode is None or not slo.has_gap_target:
            return False
        tolerated_gap_s = min(request.pace.target_s, slo.worst_gap_s)
        return must_not_wait(tolerated_gap_s, prediction.itl_s, decode.state.step_s, self._budget.delay_max_s)

    def _hold(self, job: RequestText, now: float) -> bool:
        """Hold the first token until the second arrives or the maximum time has passed; return True if it is held."""
        internal_id, seconds = job.request.internal_id, first_token_hold_s(job.request, now)
        if seconds:
            self._held[internal_id] = job
        if 0 < seconds < math.inf:
            asyncio.get_running_loop().call_later(seconds, self._release_held, internal_id)
        return seconds > 0

    def _release_held(self, internal_id: str) -> None:
        """Send a first token that has been held for the maximum time."""
        job = self._held.pop(internal_id, None)
        if job is not None and not job.request.ended:
            self._text.submit([job])

    def _flush_when_due(self, now: float) -> None:
        if self._timer is not None:
            return
        wait_s = self._budget.wait_s(now, len(self._jobs))
        if wait_s:
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._flush)
        else:
            self._flush()

    def _flush(self) -> None:
        """Submit the waiting tokens of all requests to the text thread in one batch."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            for job in self._jobs.values():
                job.waited = True
        if self._jobs:
            self._budget.spend(time.monotonic(), len(self._jobs))
            self._text.submit([job for job in self._jobs.values() if not job.request.ended])
            self._jobs.clear()

    def _deliver(self, jobs: list[RequestText]) -> None:
        """Deliver a batch that the text thread has detokenized.

        An exception during the delivery fails only the request concerned.
        """
        for job in jobs:
            if job.request.answer.over:
                continue
            try:
                self._deliver_job(job)
            except Exception as error:
                self._fail_internally(job.request, error)

    def _deliver_job(self, job: RequestText) -> None:
        request, answer = job.request, job.request.answer
        if job.failed:
            error = Internal("the answer could not be decoded; the router's log has the details")
            answer.fail(error)  # at once, because later tokens must not follow a gap in the text
            self._ends.fail(request, error)
            return
        if job.token_ids or job.text:
            answer.push(job.text, job.token_ids, job.scores, waited=job.waited)
        if job.error is not None:
            answer.fail(job.error)
        elif job.matched_stop:
            self._ends.finish(request, FinishReason.STOP, job.matched_stop)
        elif job.finish is not None:
            self._ends.finish(request, job.finish, "")
