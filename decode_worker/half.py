"""The decode half: the running batch, one token a request and step.

The path of a request, by its queues (`decode_worker/request.py`):
  1. and 2. belong to `decode_worker/admission.py`
  3. `schedule`  takes ready requests into the batch at the step's boundary, and gives each one row
  4. `apply`     appends what was sampled; a request that ends leaves at once, with its pages

Engine thread only.
"""

from collections.abc import Sequence

from decode_worker.admission import DecodeAdmission
from decode_worker.request import DecodeRequest
from engine.batch import Draw, StepRow
from wire.ending import reason_to_end
from wire.messages import ModelFacts, RequestEvent, RoutedEvent
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

    def schedule(self, budget: int) -> list[StepRow]:
        """One row of one token for each running request, at most `budget`; the pages stay the requests'."""
        self._drop_cancelled()
        room = min(self._max_batch, budget) - len(self._running)
        for request in self._admission.join(room):
            request.edges.append(EdgeStamp.now(Edge.DECODE_STARTED))
            self._running.append(request)
        return [self._row(request) for request in self._running]

    def apply(self, token_ids: Sequence[int | None]) -> list[RoutedEvent]:
        """Results of the rows of `schedule`, in its order → what the routers must hear."""
        events, staying = [], []
        for request, token_id in zip(self._running, token_ids, strict=True):
            if token_id is None:
                raise AssertionError("a decode row asks for a draw")
            event = self._append(request, token_id)
            if event.finish_reason is None:
                staying.append(request)
            else:
                self._admission.leave(request)
            events.append(RoutedEvent(request.reservation.router_id, event))
        self._running = staying
        return events

    def running_requests(self) -> int:
        """Requests in the batch."""
        return len(self._running)

    def abandon(self) -> None:
        """The engine thread has ended: nobody touches the pages of the batch any more, so every request leaves."""
        running, self._running = self._running, []
        for request in running:
            self._admission.leave(request)

    def _drop_cancelled(self) -> None:
        if any(request.cancelled for request in self._running):
            for request in self._running:
                if request.cancelled:
                    self._admission.leave(request)
            self._running = [request for request in self._running if not request.cancelled]

    def _row(self, request: DecodeRequest) -> StepRow:
        """Feed the newest token: it takes the position after the prompt and the tokens before it."""
        position = request.prompt_tokens + len(request.token_ids) - 1
        if position >= len(request.pages) * self._page_tokens:
            self._admission.grow(request)
        draw = Draw(request.reservation.sampling, request.first_draw + len(request.token_ids) - 1)
        return StepRow((request.token_ids[-1],), position, request.pages, draw)

    def _append(self, request: DecodeRequest, token_id: int) -> RequestEvent:
        index = len(request.token_ids)
        request.token_ids.append(token_id)
        reservation = request.reservation
        reason = reason_to_end(token_id, index, request.prompt_tokens, reservation.sampling, self._model)
        edges, request.edges = tuple(request.edges), []
        return RequestEvent(reservation.ref, index, (token_id,), reason, edges=edges)
