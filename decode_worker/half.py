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

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence

from decode_worker.admission import DecodeAdmission
from decode_worker.news import StepNews
from decode_worker.request import DecodeRequest, Stage
from decode_worker.running_batch import Cohort, Places, RunningBatch
from engine.batch import History, TokenRows
from wire.ending import Ending
from wire.messages import ModelFacts, RequestEvent, RequestRef, RoutedEvent, TokenLogprobs
from wire.timeline import Edge, EdgeStamp


class DecodeHalf:
    """Owns the running batch; the requests' pages are theirs until they leave."""

    def __init__(
        self, *, admission: DecodeAdmission, model: ModelFacts, page_tokens: int, max_batch_requests: int
    ) -> None:
        self._admission = admission
        self._model = model
        self._max_batch = max_batch_requests
        self._batch = RunningBatch(max_batch_requests, page_tokens)
        self._steps: deque[Cohort] = deque()
        """The requests of each step that was launched and not applied, oldest first."""
        self._cancelled = 0
        """Of the admission's count, those that were looked for."""
        self._short = False
        """Whether somebody waits for a page."""
        self.gap_targets: list[float] = []
        """What the requests of the batch bear between tokens, in seconds and rising; infinite = anything."""

    def schedule(self, budget: int) -> TokenRows:
        """One row of one token for each running request, at most `budget`; the pages stay the requests'.

        A request whose last token is on its way gets none: it ends, whatever that token is.
        """
        self._notice_cancelled()
        self._let_go()
        room = 0 if self._short else min(self._max_batch, budget) - len(self._batch)
        for request in self._admission.join(room):
            self._start(request)
        places = self._with_pages(self._batch.due())
        if not len(places):
            return TokenRows.of(())
        rows, step = self._batch.launch(places)
        self._steps.append(step)
        return rows

    def apply(self, token_ids: Sequence[int | None], logprobs: Sequence[TokenLogprobs | None] = ()) -> StepNews:
        """Results of the rows of the oldest `schedule` that gave any, in its order → what the routers must hear.

        `logprobs` is empty or has an entry for each row.
        """
        if not token_ids:
            return StepNews()
        step = self._steps.popleft()
        self._notice_cancelled()
        landed = self._batch.land(step, token_ids)
        events = [
            self._tell(step.requests[row], index, token, logprobs[row] if logprobs else None)
            for row, index, token in landed.specials()
        ]
        self._let_go()
        return StepNews(events, landed.usual(step))

    def limit(self, max_batch_requests: int) -> None:
        """Let so many requests run at most; those that run go on. From any thread."""
        self._max_batch = max_batch_requests

    def running_requests(self) -> int:
        """Requests in the batch."""
        return len(self._batch)

    def abandon(self) -> list[tuple[str, RequestRef]]:
        """The engine is lost: the whole batch leaves. Returns those of launched steps, each with its router."""
        computed = {request for step in self._steps for request in step.requests}
        self._steps.clear()
        for request in list(self._batch.requests):
            self._leave(request)
        return [(request.reservation.router_id, request.reservation.ref) for request in computed]

    def _start(self, request: DecodeRequest) -> None:
        request.edges.append(EdgeStamp.now(Edge.DECODE_STARTED))
        sampling = request.reservation.sampling
        request.ending = Ending.of(request.prompt_tokens, sampling, self._model)
        if sampling.penalized:
            request.history = History(request.reservation.question, request.token_ids)
        self._batch.join(request)
        insort(self.gap_targets, request.reservation.gap_target_s)

    def _notice_cancelled(self) -> None:
        cancelled = self._admission.cancelled
        if cancelled != self._cancelled:
            self._cancelled = cancelled
            for request in [each for each in self._batch.requests if each.cancelled]:
                self._batch.drop(request)

    def _with_pages(self, places: Places) -> Places:
        """Those of `places` that have a page for their next row; others may have left or stopped for it."""
        self._short = False
        needy = self._batch.without_page(places)
        if not needy:
            return places
        preemptions = self._admission.preemptions
        for request in needy:
            if request.stage is not Stage.RUNNING or request.leaving:
                continue
            if self._admission.grow(request, list(self._batch.requests)):
                self._batch.grown(request)
            else:
                self._short = True
        if not self._short and self._admission.preemptions == preemptions:
            return places
        self._follow_preemption()
        return self._batch.with_page(self._batch.due())

    def _follow_preemption(self) -> None:
        for request in list(self._batch.requests):
            if request.stage is not Stage.RUNNING:
                self._part(request)
            elif request.yielding:
                self._batch.stop(request)

    def _let_go(self) -> None:
        """Of those that get no more rows, once no launched step writes to their pages."""
        for request in self._batch.gone():
            if request.yielding and not request.cancelled and not request.ended:
                self._part(request)
                self._admission.preempt(request)
            else:
                self._leave(request)

    def _leave(self, request: DecodeRequest) -> None:
        self._part(request)
        self._admission.leave(request)

    def _part(self, request: DecodeRequest) -> None:
        """It is in the batch no more."""
        self._batch.leave(request)
        del self.gap_targets[bisect_left(self.gap_targets, request.reservation.gap_target_s)]

    def _tell(self, request: DecodeRequest, index: int, token_id: int, score: TokenLogprobs | None) -> RoutedEvent:
        """A token of which there may be more to tell: that it is the last, say."""
        edges, request.edges = tuple(request.edges), []
        reason = request.ending.reason(token_id, index)
        if reason is not None:
            request.ended = True
            self._batch.drop(request)
        self._batch.told(request)
        reservation = request.reservation
        scores = () if score is None else (score,)
        event = RequestEvent(reservation.ref, index, (token_id,), reason, edges=edges, logprobs=scores)
        return RoutedEvent(reservation.router_id, event)
