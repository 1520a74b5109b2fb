"""From arrival to a pair of workers: admission, the queue, late binding. No I/O and no tasks: whoever runs requests, on
real workers or simulated ones, asks it for the next one and tells it what became of them.
"""

from collections.abc import Iterator

from costs.answer_length import AnswerLengths
from router.config import RouterConfig
from router.placement.admission import AdmissionController
from router.placement.fleet import Fleet
from router.placement.policy import Placement, PlacementPolicy
from router.placement.queue import RequestQueue
from router.placement.queued_request import QueuedRequest
from router.placement.worker_state import AnswerWork, Clock, PromptWork, WorkerState
from router.refusal import Refusal, Refused
from wire.ending import pages_for

_ANSWER_WEIGHT = 2.0
"""What a token of an answer counts in a tenant's share, beside one of a prompt that is computed."""


class RequestScheduler:
    """Binds requests to workers as late as it can: when a worker has capacity for the next one."""

    def __init__(self, config: RouterConfig, policy: PlacementPolicy, fleet: Fleet, clock: Clock) -> None:
        self._config = config
        self._policy = policy
        self._fleet = fleet
        self._clock = clock
        self._queue = RequestQueue(config.max_queued_requests, config.tenant_queue_limit)
        self._admission = AdmissionController(policy, fleet, self._queue, config.max_deferral_s)
        self._lengths = AnswerLengths()
        self._seen_changes = 0
        """`Fleet.changes` when requests that no worker could serve were last tried again."""

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    def __iter__(self) -> Iterator[QueuedRequest]:
        """These, in no order."""
        return iter(self._queue)

    def enter(self, request: QueuedRequest, *, more: int = 0, held: int = 0, held_own: int = 0) -> None:
        """Queue a new request, which is going to need capacity for `more`; `held` ones of others are not queued yet,
        `held_own` of them its tenant's. `Refused` if the queue is full, or its class's promise cannot be held.
        """
        if self._queue.full_with(more + held):
            limit = self._config.max_queued_requests
            message = f"{limit} requests are waiting, the most this router queues; try again later"
            raise Refused(Refusal.QUEUE_FULL, message, retry_after_s=self._config.retry_after_s)
        if self._queue.full_for(request.tenant, more + held_own):
            limit = self._config.tenant_queue_limit
            message = f"{limit} requests with this API key are waiting, the most one key may have; try again later"
            raise Refused(Refusal.TENANT_QUEUE_FULL, message, retry_after_s=self._config.retry_after_s)
        self._expect_answer(request)
        self._admission.admit(request, more + held)
        self._queue.push(request)

    def answer_tokens(self, request: QueuedRequest) -> float:
        """The length of its answer, on average by those that have ended."""
        return self._lengths.mean(request.max_tokens, to_the_limit=request.to_the_limit)

    def enter_again(self, request: QueuedRequest) -> None:
        """An attempt failed, or a worker refused it: back to its place."""
        self._queue.push(request)

    def leave(self, request: QueuedRequest) -> None:
        """It waits no more, if it did."""
        self._queue.remove(request)

    def head(self) -> QueuedRequest | None:
        """Whose turn it is. A request that missed its target goes behind those that can still meet theirs."""
        now = self._clock()
        if self._seen_changes != self._fleet.changes:
            self._seen_changes = self._fleet.changes
            self._queue.bring_back()
        while (request := self._queue.head()) is not None:
            if request.resumed or now - request.arrived_s <= request.slo.ttft_s:
                return request
            self._queue.remove(request)
            self._admission.degrade(request)
            self._queue.push(request)
        return None

    def bind(self, request: QueuedRequest) -> Placement | None:
        """Workers for the request at the head, which leaves the queue; None = no worker has capacity for it now."""
        self._expect_answer(request)
        placement = self._policy.place(request, self._fleet, self._clock() - request.arrived_s)
        if placement is None:
            return None
        self._queue.remove(request)
        if not request.resumed:
            # Once: a request that a worker refused after all has been given nothing more.
            tokens = placement.prediction.computed_tokens
            self._queue.charge(request.tenant, max(0, tokens - request.charged))
            request.charged = max(tokens, request.charged)
        return placement

    def set_aside(self, request: QueuedRequest) -> bool:
        """Whether no worker could ever serve the request at the head: then others pass it until workers change."""
        hopeless = not self._policy.could_serve(request, self._fleet)
        if hopeless:
            self._queue.set_aside(request)
        return hopeless

    def ended(self, request: QueuedRequest, answer_tokens: int) -> None:
        """The request is over; its answer was so long."""
        if answer_tokens:
            self._queue.charge(request.tenant, _ANSWER_WEIGHT * answer_tokens)
            self._lengths.learn(request.max_tokens, answer_tokens)

    def _expect_answer(self, request: QueuedRequest) -> None:
        limit, to_the_limit = request.max_tokens, request.to_the_limit
        request.mean_tokens = self._lengths.mean(limit, to_the_limit=to_the_limit)
        request.expected_tokens = self._lengths.expect(limit, request.answered, to_the_limit=to_the_limit)


def record(request: QueuedRequest, placement: Placement, prefill: WorkerState, decode: WorkerState | None) -> None:
    """Count a placed request at its workers."""
    cached = placement.prediction.cached_tokens
    prefill.add_prompt(request.wire_id, PromptWork(request.prefill_tokens - cached, cached))
    if decode is not None:
        pages = pages_for(request.reserved_tokens, decode.page_tokens)
        # With half of the expected answer.
        context = (request.prefill_tokens + request.reserved_tokens) // 2
        decode.add_answer(request.wire_id, AnswerWork(pages, context, request.slo))
