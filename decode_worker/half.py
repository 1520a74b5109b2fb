"""The decode half: the running batch, one token a request and step.

A step may be scheduled while the one before it runs: a request's newest token is then named by its row there.

The path of a request, by its queues (`decode_worker/request.py`):
  1. and 2. belong to `decode_worker/admission.py`
  3. `schedule`  takes ready requests into the batch at the step's boundary, and gives each one row. Where an answer
                 needs a page and there is none, the youngest request leaves for it (`preemption.py`), or it waits
  4. `apply`     appends what was sampled; a request that ends or gives way leaves with its pages, once no step uses
                 them

Engine thread only. What all requests need in a step is columns (`decode_worker/running_batch.py`).
"""

import logging
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import cast

from decode_worker.batch_snapshot import NO_OUTPUT, CompletedStep, StepOutput
from decode_worker.preemption import age
from decode_worker.request import DecodeRequest, Stage
from decode_worker.requests import RunningRequests
from decode_worker.running_batch import RunningBatch
from engine.steps.batch import History, TokenRows
from wire.ending import Ending, failure_event
from wire.errors import Internal
from wire.logging.logs import about
from wire.messages import ModelFacts, RequestEvent, RequestRef, RoutedEvent, TokenLogprobs
from wire.tracing.timeline import Edge, EdgeStamp

log = logging.getLogger(__name__)

NO_ROWS = TokenRows.of(())


class DecodeHalf:
    """Owns the running batch; the requests' pages are theirs until they leave."""

    def __init__(
        self, *, requests: RunningRequests, model: ModelFacts, page_tokens: int, max_batch_requests: int
    ) -> None:
        self._requests = requests
        self._model = model
        self._max_batch = max_batch_requests
        self._batch = RunningBatch(max_batch_requests, page_tokens)
        self._cancelled = 0
        """Of those counted so far, how many were looked for."""
        self.gap_targets: list[float] = []
        """What the requests of the batch bear between tokens, in seconds and rising; infinite = anything."""

    def schedule(self, budget: int) -> TokenRows:
        """One row of one token for each running request, at most `budget`; the pages stay the requests'.

        A request whose last token is on its way gets none: it ends, whatever that token is.
        """
        self._notice_cancelled()
        self._let_go()
        self._take_ready(budget)
        self._give_pages()
        # All that ran may have given way just now, to older ones that are ready: nobody else would wake the loop.
        while not self._batch.requests and self._take_ready(budget):
            self._give_pages()
        return self._batch.launch() or NO_ROWS

    def apply(self, token_ids: Sequence[int | None], logprobs: Sequence[TokenLogprobs | None] = ()) -> StepOutput:
        """Results of the rows of the oldest `schedule` that gave any, in its order → what the routers must hear.

        `logprobs` is empty or has an entry for each row.
        """
        if not token_ids:
            return NO_OUTPUT
        self._notice_cancelled()
        completed = self._batch.complete(cast("Sequence[int]", token_ids))
        events = [self._tell_or_fail(completed, row, logprobs[row] if logprobs else None) for row in completed.special]
        self._let_go()
        return StepOutput(events, completed)

    def limit(self, max_batch_requests: int) -> None:
        """Let so many requests run at most; those that run go on. From any thread."""
        self._max_batch = max_batch_requests

    def running_requests(self) -> int:
        """Requests in the batch."""
        return len(self._batch)

    @property
    def idle(self) -> bool:
        """Whether nobody is in the batch or waits to join it."""
        return not (self._batch.requests or self._requests.ready)

    def abandon(self) -> list[tuple[str, RequestRef]]:
        """The engine is lost: the whole batch leaves. Returns those of launched steps, each with its router."""
        computed = {slot.request: None for _, snapshot in self._batch.in_flight_steps for slot in snapshot.slots}
        self._batch.in_flight_steps.clear()
        for request in list(self._batch.requests):
            self._leave(request)
        return [(request.reservation.router_id, request.reservation.ref) for request in computed]

    def _take_ready(self, budget: int) -> bool:
        """Into the batch, if there is room; whether there was anybody."""
        # Who becomes ready behind this look is in the next step.
        if not self._requests.ready or self._batch.waits_for_pages:
            return False
        joining = self._requests.join(min(self._max_batch, budget) - len(self._batch))
        for request in joining:
            self._start(request)
        return bool(joining)

    def _start(self, request: DecodeRequest) -> None:
        request.edges.append(EdgeStamp.now(Edge.DECODE_STARTED))
        sampling = request.reservation.sampling
        request.ending = Ending.of(request.prompt_tokens, sampling, self._model)
        if sampling.penalized:
            request.history = History(request.reservation.question, request.token_ids)
        self._batch.join(request)
        insort(self.gap_targets, request.reservation.gap_target_s)

    def _notice_cancelled(self) -> None:
        cancelled = self._requests.cancelled
        if cancelled != self._cancelled:
            self._cancelled = cancelled
            for request in [each for each in self._batch.requests if each.cancelled]:
                self._batch.drop(request)

    def _give_pages(self) -> None:
        """To those that need one for their next row; others may leave or stop for it."""
        needy = self._batch.without_page()
        if not needy:
            return
        needy.sort(key=age)  # or who waits for an older one that gives way itself would wait for nobody
        staying = [request for request in needy if request.stage is Stage.RUNNING and not request.leaving]
        if not staying or self._requests.grow_all(staying):
            for request in staying:
                self._batch.page_added(request)
            return
        preemptions, short = self._requests.preemptions, False
        for request in needy:
            if request.stage is not Stage.RUNNING or request.leaving:
                continue
            if self._requests.grow(request, self._batch.requests):
                self._batch.page_added(request)
            else:
                short = True
        if short or self._requests.preemptions != preemptions:
            self._follow_preemption()

    def _follow_preemption(self) -> None:
        for request in list(self._batch.requests):
            if request.stage is not Stage.RUNNING:
                self._part(request)
            elif request.yielding:
                self._batch.stop(request)

    def _let_go(self) -> None:
        """Of those that get no more rows, once no launched step writes to their pages."""
        for request in self._batch.drained():
            if request.yielding and not request.cancelled and not request.ended:
                self._part(request)
                self._requests.preempt(request)
            else:
                self._leave(request)

    def _leave(self, request: DecodeRequest) -> None:
        self._part(request)
        self._requests.leave(request)

    def _part(self, request: DecodeRequest) -> None:
        """It is in the batch no more."""
        self._batch.leave(request)
        del self.gap_targets[bisect_left(self.gap_targets, request.reservation.gap_target_s)]

    def _tell_or_fail(self, completed: CompletedStep, row: int, score: TokenLogprobs | None) -> RoutedEvent:
        """A request whose result cannot be handled leaves the batch alone, with Internal."""
        try:
            return self._tell(completed, row, score)
        except Exception:
            request = completed.token(row)[0]
            reservation = request.reservation
            ref, reason = reservation.ref, Internal("a token of the request could not be handled; see the worker's log")
            log.exception("request %s met a defect", ref.request_id, extra=about(ref.request_id))
            request.ended = True
            self._batch.drop(request)
            return RoutedEvent(reservation.router_id, failure_event(ref, reason))

    def _tell(self, completed: CompletedStep, row: int, score: TokenLogprobs | None) -> RoutedEvent:
        """A token of which there may be more to tell: that it is the last, say."""
        request, index, token_id = completed.token(row)
        edges, request.edges = tuple(request.edges), []
        reason = request.ending.reason(token_id, index)
        if reason is not None:
            request.ended = True
            self._batch.drop(request)
        self._batch.event_sent(request)
        reservation = request.reservation
        scores = () if score is None else (score,)
        event = RequestEvent(reservation.ref, index, (token_id,), reason, edges=edges, logprobs=scores)
        return RoutedEvent(reservation.router_id, event)
