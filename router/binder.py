"""From the door to a pair of workers: admission by prediction, the queue, late binding. No I/O, no tasks: whoever runs
requests, on real workers or in a virtual world, asks it for the next one and keeps the books of what was placed.
"""

from collections.abc import Iterator

from costs.answer_length import AnswerLengths
from router.config import RouterConfig
from router.fleet import Fleet
from router.gate import Gate
from router.long_gaps import spare_gaps
from router.placed_work import AnswerWork, PromptWork
from router.placement import Pair, Placement
from router.queue import RequestQueue
from router.refusal import Refusal, Refused
from router.ticket import Ticket
from router.worker_books import Clock, WorkerBooks
from wire.ending import pages_for

_ANSWER_WEIGHT = 2.0
"""What a token of an answer counts on a tenant's account, beside one of a prompt that is computed."""


class Binder:
    """Binds requests to workers as late as it can: when somebody has room for the next one."""

    def __init__(self, config: RouterConfig, placement: Placement, fleet: Fleet, clock: Clock) -> None:
        self._config = config
        self._placement = placement
        self._fleet = fleet
        self._clock = clock
        self._queue = RequestQueue(config.max_queued_requests, config.tenant_queue_limit)
        self._gate = Gate(placement, fleet, self._queue, config.patience_s)
        self._lengths = AnswerLengths()
        self._seen_changes = 0
        """Of the fleet, when it was last seen who can serve what waits."""

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    def __iter__(self) -> Iterator[Ticket]:
        """These, in no order."""
        return iter(self._queue)

    def enter(self, ticket: Ticket, *, more: int = 0, held: int = 0, held_own: int = 0) -> None:
        """Queue a new request, which is going to need room for so many `more`; `held` ones of others stand in no queue
        yet, `held_own` of them its tenant's. `Refused` if there is no room, or no hope to keep what its class promises.
        """
        if self._queue.full_with(more + held):
            limit = self._config.max_queued_requests
            message = f"{limit} requests are waiting, the most this router queues; try again later"
            raise Refused(Refusal.QUEUE_FULL, message, retry_after_s=self._config.retry_after_s)
        if self._queue.full_for(ticket.tenant, more + held_own):
            limit = self._config.tenant_queue_limit
            message = f"{limit} requests with this API key are waiting, the most one key may have; try again later"
            raise Refused(Refusal.TENANT_QUEUE_FULL, message, retry_after_s=self._config.retry_after_s)
        self._gate.admit(ticket, self._clock(), more + held)
        self._push(ticket)

    def answer_tokens(self, ticket: Ticket) -> float:
        """As long as its answer is on average, by those that have ended."""
        return self._lengths.mean(ticket.max_tokens, to_the_limit=ticket.to_the_limit)

    def enter_again(self, ticket: Ticket, *, turned_away: bool = False) -> None:
        """An attempt failed: back to its place. With `turned_away` by a worker that had no room after all."""
        if turned_away:
            # A pace that counted such placements would be the best just where nobody has room.
            self._gate.pace.take_back(self._clock(), ticket.service_s)
        self._push(ticket)

    def leave(self, ticket: Ticket) -> None:
        """It waits no more, if it did."""
        self._queue.remove(ticket)
        self._gate.pace.note(self._clock(), self._queue.moves)

    def head(self) -> Ticket | None:
        """Whose turn it is. Who has missed the target by now goes behind those that can still meet theirs."""
        now = self._clock()
        if self._seen_changes != self._fleet.changes:
            self._seen_changes = self._fleet.changes
            self._queue.bring_back()
            self._gate.pace.note(now, self._queue.moves)
        while (ticket := self._queue.head()) is not None:
            if ticket.resumed or now - ticket.arrived_s <= ticket.slo.ttft_s:
                return ticket
            self._queue.remove(ticket)
            self._gate.degrade(ticket)
            self._queue.push(ticket)
        return None

    def bind(self, ticket: Ticket) -> Pair | None:
        """Workers for the request at the head, which leaves the queue; None = nobody has room for it now."""
        now = self._clock()
        ticket.expected_tokens = self._lengths.expect(
            ticket.max_tokens, ticket.answered, to_the_limit=ticket.to_the_limit
        )
        pair = self._placement.choose(ticket.need(now), self._fleet)
        if pair is None:
            return None
        self._queue.remove(ticket)
        self._gate.pace.note(now, self._queue.moves, ticket.service_s)
        if not ticket.resumed:
            tokens = pair.forecast.computed_tokens if pair.forecast else ticket.prefill_tokens
            # Once: who was sent elsewhere, as a worker had no room after all, has been given nothing more.
            self._queue.charge(ticket.tenant, max(0, tokens - ticket.charged))
            ticket.charged = max(tokens, ticket.charged)
        return pair

    def set_aside(self, ticket: Ticket) -> bool:
        """Whether nobody here could ever serve the request at the head: then others pass it until workers change."""
        hopeless = not self._placement.could_serve(ticket.need(self._clock()), self._fleet)
        if hopeless:
            self._queue.set_aside(ticket)
            self._gate.pace.note(self._clock(), self._queue.moves)
        return hopeless

    def ended(self, ticket: Ticket, answer_tokens: int) -> None:
        """The request is over; its answer was so long."""
        if answer_tokens:
            self._queue.charge(ticket.tenant, _ANSWER_WEIGHT * answer_tokens)
            self._placement.learn_answer(answer_tokens)
            self._lengths.learn(ticket.max_tokens, answer_tokens)

    def _push(self, ticket: Ticket) -> None:
        self._queue.push(ticket)
        self._gate.pace.note(self._clock(), True)


def book(ticket: Ticket, pair: Pair, prefill: WorkerBooks, decode: WorkerBooks | None) -> None:
    """Enter the work of a placed request in the books of its workers."""
    forecast = pair.forecast
    cached = forecast.cached_tokens if forecast else 0
    prefill.book_prefill(ticket.wire_id, PromptWork(ticket.prefill_tokens - cached, cached))
    if forecast is not None:
        prefill.note_prompt_steps(forecast.prompt_steps, forecast.longest_s)
    if decode is not None:
        kv_tokens = ticket.need(ticket.arrived_s).room_tokens
        # With half of the expected answer.
        context = (ticket.prefill_tokens + kv_tokens) // 2
        spare = spare_gaps(ticket.slo, forecast.answer_tokens if forecast else 0.0)
        pages = pages_for(kv_tokens, decode.page_tokens)
        decode.book_decode(ticket.wire_id, AnswerWork(pages, context, ticket.slo, spare))
