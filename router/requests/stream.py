"""From workers' events to the client's answer: order the tokens, turn them into text, end the answer.

Every token is sent at once as long as all answers together stay within a budget of chunks a second, so that sending
never takes the CPU from an engine on the same machine. Beyond it a chunk carries the tokens of several steps, but for
answers whose class would be let down by that.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from typing import Protocol

from router.config import RouterConfig
from router.requests.chunk_budget import ChunkBudget, must_not_wait
from router.requests.first_token import hold_s
from router.requests.request import RoutedRequest
from router.requests.text_thread import RequestText, TextThread
from wire.errors import Internal, TandemError, Unavailable, from_code
from wire.messages import FinishReason, RequestEvent, StepEvents
from wire.tracing.timeline import Edge


class RequestOwner(Protocol):
    """Who ends requests: `RequestEnds`."""

    def finish(self, request: RoutedRequest, reason: FinishReason, matched_stop: str) -> None: ...

    def fail(self, request: RoutedRequest, error: TandemError) -> None: ...

    def fail_attempt(self, request: RoutedRequest, error: TandemError) -> None: ...

    def break_off(self, request: RoutedRequest, error: Exception) -> None: ...

    def release(self, request: RoutedRequest) -> None: ...

    def requeue(self, request: RoutedRequest) -> None: ...

    def settle(self, request: RoutedRequest) -> None: ...


class EventStream:
    """Takes the events of both workers of every request; belongs to the event loop."""

    def __init__(self, config: RouterConfig, owner: RequestOwner) -> None:
        self._owner = owner
        self._text = TextThread(self._deliver)
        self._jobs: dict[str, RequestText] = {}
        self._budget = ChunkBudget(config.chunks_per_s, config.chunk_delay_max_s)
        self._timer: asyncio.TimerHandle | None = None
        self._held: dict[str, RequestText] = {}
        """First tokens that wait for the second."""

    async def close(self) -> None:
        """End the text thread."""
        if self._timer is not None:
            self._timer.cancel()
        await self._text.stop()

    def take(self, step: StepEvents, live: Mapping[str, RoutedRequest]) -> None:
        """One worker's step. Events of requests and attempts that are over are dropped; one that cannot be taken ends
        its own request and no other.
        """
        now = time.monotonic()
        urgent: list[RequestText] = []
        for event in step.each():
            request = live.get(event.ref.request_id)
            if request is None or event.ref.attempt != request.attempt or request.prefill is None:
                continue
            try:
                self._take_event(request, event, urgent, now)
            except Exception as error:
                self.forget(request)
                self._owner.break_off(request, error)
        self._send(urgent, now)
        if self._jobs:
            self._flush_when_due(now)

    def _take_event(self, request: RoutedRequest, event: RequestEvent, urgent: list[RequestText], now: float) -> None:
        """`urgent` collects the jobs that must not wait; it is sent here where something must not overtake them."""
        request.last_heard = now
        if event.edges or event.transfer is not None:
            self._note(request, event)
        if event.preempted:
            request.preempted_at = event.first_index
        if event.finish_reason is FinishReason.ERROR or event.finish_reason is FinishReason.ABORT:
            self._send(urgent, now)  # its own tokens may be among these
            if not request.generated:
                self._owner.fail_attempt(request, _error(event))
        elif event.token_ids or event.finish_reason is not None:
            try:
                must_not_wait = self._take_tokens(request, event, now)
            except Unavailable as error:
                self._send(urgent, now)
                self._owner.fail(request, error)
                return
            if must_not_wait:
                urgent.append(self._jobs.pop(request.wire_id))
        if request.preempted_at is not None and request.assembler.count >= request.preempted_at:
            request.waiting_since = now
            self._owner.requeue(request)

    def forget(self, request: RoutedRequest) -> None:
        """It is over: nothing of it is sent any more."""
        self._jobs.pop(request.wire_id, None)
        self._held.pop(request.wire_id, None)

    def fail(self, request: RoutedRequest, error: TandemError) -> None:
        """Its answer ends with `error`, behind all tokens of it that are here in order."""
        if not request.assembler.count or request.answer.over:
            request.answer.fail(error)
            return
        wire_id = request.wire_id
        job = self._held.pop(wire_id, None) or self._jobs.pop(wire_id, None) or RequestText(request=request)
        job.error = error
        self._text.submit([job])

    def _send(self, urgent: list[RequestText], now: float) -> None:
        if urgent:
            self._budget.spend(now, len(urgent))
            self._text.submit(urgent.copy())
            urgent.clear()

    def _take_tokens(self, request: RoutedRequest, event: RequestEvent, now: float) -> bool:
        """Add the tokens that are next in order to the request's job; whether the job must not wait."""
        assembler = request.assembler
        first = assembler.count == 0
        fresh, logprobs = assembler.add(event.first_index, event.token_ids, event.logprobs)
        if event.finish_reason is not None:
            assembler.finish_at(event.first_index + len(event.token_ids), event.finish_reason)
        if event.first_index == request.answered:
            assert request.prefill is not None
            request.prefill.state.prompt_computed(request.wire_id)
            request.first_token_s = request.first_token_s or now
            if event.first_index == 0:
                request.cached_tokens = event.cached_tokens
        elif request.lease is not None:
            self._admitted(request)
        finished = assembler.finished
        if finished is not None:
            request.last_token_s = now
            self._generated(request)
        if not fresh and finished is None:
            return False
        held = self._held.pop(request.wire_id, None)
        job = held or self._jobs.get(request.wire_id) or RequestText(request=request)
        job.token_ids.extend(fresh)
        job.logprobs.extend(logprobs)
        job.finish = finished
        if first and len(fresh) == 1 and finished is None and self._hold(job, now):
            return False
        self._jobs[request.wire_id] = job
        return first or held is not None or finished is not None or self._keeps_pace(request)

    def _keeps_pace(self, request: RoutedRequest) -> bool:
        """Whether what its class tolerates between tokens held when it was placed, and would not if tokens waited for
        others: where steps have grown since then, by steps as they are.
        """
        slo, prediction, decode = request.queued.slo, request.prediction, request.decode
        if prediction is None or decode is None or not slo.has_gap_target:
            return False
        bears_s = min(request.pace.target_s, slo.worst_gap_s)
        return must_not_wait(bears_s, prediction.itl_s, decode.state.step_s, self._budget.delay_max_s)

    def _hold(self, job: RequestText, now: float) -> bool:
        """Whether this first token waits for the second."""
        request = job.request
        if request.decode is None:
            return False
        queued = request.queued
        seconds = hold_s(queued.slo, now - queued.arrived_s, queued.mean_tokens)
        if seconds:
            self._held[request.wire_id] = job
        if 0 < seconds < math.inf:
            asyncio.get_running_loop().call_later(seconds, self._let_go, request.wire_id)
        return seconds > 0

    def _let_go(self, wire_id: str) -> None:
        """It has waited long enough."""
        job = self._held.pop(wire_id, None)
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
        """Send what waits: one hop to the text thread for all requests."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            for job in self._jobs.values():
                job.waited = True
        if self._jobs:
            self._budget.spend(time.monotonic(), len(self._jobs))
            self._text.submit([job for job in self._jobs.values() if not job.request.ended])
            self._jobs.clear()

    def _generated(self, request: RoutedRequest) -> None:
        """The workers have finished it: their room is free before the last text is made."""
        request.generated = True
        self._owner.settle(request)

    def _note(self, request: RoutedRequest, event: RequestEvent) -> None:
        request.edges.extend(event.edges)
        if event.transfer is not None:
            request.transfer = event.transfer
            if request.decode is not None:
                request.decode.learn_transfer(event.transfer)
            self._handed_over(request)
        if any(stamp.edge is Edge.DECODE_ADMITTED for stamp in event.edges):
            self._admitted(request)

    def _admitted(self, request: RoutedRequest) -> None:
        """The decode worker has the request for good: its lease needs no heartbeat."""
        request.lease = None
        if request.held:
            self._owner.release(request)
        if request.decode is not None:
            request.decode.leases.drop(request.wire_id)
        self._handed_over(request)

    def _handed_over(self, request: RoutedRequest) -> None:
        """The prefill worker is needed no longer, once its token is here: its death would not matter."""
        if request.prefill is not None and request.assembler.count > request.answered:
            request.prefill.state.remove_prompt(request.wire_id)

    def _deliver(self, jobs: list[RequestText]) -> None:
        """Back from the text thread: one call for all the requests of a step. A job that cannot be delivered ends its
        own answer and no other.
        """
        for job in jobs:
            if job.request.answer.over:
                continue
            try:
                self._deliver_job(job)
            except Exception as error:
                self.forget(job.request)
                self._owner.break_off(job.request, error)

    def _deliver_job(self, job: RequestText) -> None:
        request, answer = job.request, job.request.answer
        if job.failed:
            error = Internal("the answer could not be decoded; the router's log has the details")
            answer.fail(error)  # at once: what comes behind it must not follow a gap
            self._owner.fail(request, error)
            return
        if job.token_ids or job.text:
            answer.push(job.text, job.token_ids, job.scores, waited=job.waited)
        if job.error is not None:
            answer.fail(job.error)
        elif job.matched_stop:
            self._owner.finish(request, FinishReason.STOP, job.matched_stop)
        elif job.finish is not None:
            self._owner.finish(request, job.finish, "")


def _error(event: RequestEvent) -> TandemError:
    if event.error is not None:
        return from_code(event.error.code, event.error.message, event.error.retry_after_s)
    if event.finish_reason is FinishReason.ABORT:
        return Unavailable("a worker gave the request up, as it does when it drains; send it again")
    return Internal("a worker failed without saying why; its log has the details")
