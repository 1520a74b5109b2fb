"""The decode half: the running batch, one token a request and step.

A step may be scheduled while the one before it runs: a request's newest token is then named by its row there.

The path of a request, by its queues (`decode_worker/request.py`):
  1. and 2. belong to `decode_worker/admission.py`
  3. `schedule`  takes ready requests into the batch at the step's boundary, and gives each one row
  4. `apply`     appends what was sampled; a request that ends leaves with its pages, once no step uses them

Engine thread only.
"""

from collections import deque
from collections.abc import Sequence

from decode_worker.admission import DecodeAdmission
from decode_worker.request import DecodeRequest
from engine.batch import Draw, History, StepRow
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
        self._page_tokens = page_tokens
        self._max_batch = max_batch_requests
        self._running: list[DecodeRequest] = []
        self._steps: deque[list[DecodeRequest]] = deque()
        """The requests of each step that was launched and not applied, oldest first."""

    def schedule(self, budget: int) -> list[StepRow]:
        """One row of one token for each running request, at most `budget`; the pages stay the requests'.

        A request whose last token is on its way gets none: it ends, whatever that token is.
        """
        self._drop_cancelled()
        room = min(self._max_batch, budget) - len(self._running)
        for request in self._admission.join(room):
            request.edges.append(EdgeStamp.now(Edge.DECODE_STARTED))
            sampling = request.reservation.sampling
            request.ending = Ending.of(request.prompt_tokens, sampling, self._model)
            if sampling.penalized:
                request.history = History(request.reservation.question, request.token_ids)
            self._running.append(request)
        step: list[DecodeRequest] = []
        rows: list[StepRow] = []
        for request in self._running:
            planned = len(request.token_ids) + request.in_flight
            if not request.cancelled and planned < request.ending.limit:
                rows.append(self._row(request, planned))
                request.in_flight += 1
                request.row = len(step)
                step.append(request)
        if step:
            self._steps.append(step)
        return rows

    def apply(
        self, token_ids: Sequence[int | None], logprobs: Sequence[TokenLogprobs | None] = ()
    ) -> list[RoutedEvent]:
        """Results of the rows of the oldest `schedule` that gave any, in its order → what the routers must hear.

        `logprobs` is empty or has an entry for each row.
        """
        events = []
        scores = logprobs or (None,) * len(token_ids)
        step = self._steps.popleft() if token_ids else ()
        for request, token_id, score in zip(step, token_ids, scores, strict=True):
            if token_id is None:
                raise AssertionError("a decode row asks for a draw")
            request.in_flight -= 1
            if not request.ended and not request.cancelled:
                event = self._append(request, token_id, () if score is None else (score,))
                request.ended = event.finish_reason is not None
                events.append(RoutedEvent(request.reservation.router_id, event))
            # A step that was launched before the end was known still writes to its pages.
            if request.ended and not request.in_flight:
                self._admission.leave(request)
        self._running = [request for request in self._running if not request.ended]
        return events

    def running_requests(self) -> int:
        """Requests in the batch."""
        return len(self._running)

    def abandon(self) -> list[tuple[str, RequestRef]]:
        """The engine is lost: the whole batch leaves. Returns those of launched steps, each with its router."""
        computed = {request for step in self._steps for request in step}
        left = {*self._running, *computed}
        self._running = []
        self._steps.clear()
        for request in left:
            self._admission.leave(request)
        return [(request.reservation.router_id, request.reservation.ref) for request in computed]

    def _drop_cancelled(self) -> None:
        gone = [request for request in self._running if request.cancelled and not request.in_flight]
        if gone:
            for request in gone:
                self._admission.leave(request)
            self._running = [request for request in self._running if request not in gone]

    def _row(self, request: DecodeRequest, planned: int) -> StepRow:
        """Feed the newest of the `planned` tokens that are here or on their way: it takes the position after the prompt
        and the tokens before it.
        """
        position = request.prompt_tokens + planned - 1
        if position >= len(request.pages) * self._page_tokens:
            self._admission.grow(request)
        draw = Draw(request.reservation.sampling, request.first_draw + planned - 1, request.history)
        source = request.row if request.in_flight else None
        return StepRow((request.token_ids[-1],), position, request.pages, draw, source)

    def _append(self, request: DecodeRequest, token_id: int, logprobs: tuple[TokenLogprobs, ...]) -> RequestEvent:
        index = len(request.token_ids)
        request.token_ids.append(token_id)
        edges: tuple[EdgeStamp, ...] = ()
        if request.edges:
            edges, request.edges = tuple(request.edges), []
        reason = request.ending.reason(token_id, index)
        return RequestEvent(request.reservation.ref, index, (token_id,), reason, edges=edges, logprobs=logprobs)
