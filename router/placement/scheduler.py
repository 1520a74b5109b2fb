"""The router's scheduler: admission of requests, the queue, and the choice of workers when they have capacity.

It does no I/O: the dispatcher, real or simulated, gets the next request from it and reports how a request ends.
"""

from router.config import RouterConfig
from router.placement.fleet import Fleet
from router.placement.latency_model import PromptPrediction
from router.placement.policy import Placement, PlacementPolicy
from router.placement.queue import QueuedRequest, RequestQueue
from router.placement.worker_state import BACK_OFF_S, AnswerWork, Clock, PromptWork, WorkerState
from router.refusal import Refusal, Refused
from tandem.cost_model.answer_length import AnswerLengths
from tandem.protocol.messages import PeerRef
from tandem.settings.slo import BEST_EFFORT, Overload

_RETRY_MIN_S = 2 * BACK_OFF_S


class AdmissionController:
    """Checks, by the predictions of placement, whether the SLO targets of an arriving request can be met.

    The `RequestScheduler` owns it and calls it on the event loop.
    """

    def __init__(
        self, policy: PlacementPolicy, fleet: Fleet, queue: RequestQueue, clock: Clock, deferral_s: float
    ) -> None:
        """`deferral_s` is the TTFT target, in seconds, that the queue's order assumes for requests without one."""
        self._policy, self._fleet, self._queue, self._clock, self._deferral_s = policy, fleet, queue, clock, deferral_s

    def admit(self, request: QueuedRequest, others: int = 0) -> None:
        """Set the request's position in the queue, and check that its targets can be met.

        `others` is the number of requests that arrived before or with this request but are not queued yet. If the
        targets cannot be met, the SLO class decides: the request is served without targets, or `Refused` is raised with
        the time after which to retry. Nothing is checked if no live worker can prefill the request, or if the worker of
        the prediction has not measured its steps yet.
        """
        prediction = self._policy.predict_prompt(request, self._fleet)
        if prediction is not None:
            request.service_s = prediction.compute_s
        self.schedule(request)
        if prediction is None or not prediction.worker.cost.parameters.observed:
            return
        refused = self._check_ttft(request, prediction, others) or self._check_itl(request, others)
        if refused is not None and request.slo.overload is Overload.REJECT:
            raise refused
        if refused is not None:
            self.degrade(request)

    def degrade(self, request: QueuedRequest) -> None:
        """Serve the request as best effort, without targets, after the requests that have targets."""
        request.slo = BEST_EFFORT
        self.schedule(request)

    def schedule(self, request: QueuedRequest) -> None:
        """Set `start_by_s`, the latest start of prefill by which the queue is ordered.

        With a TTFT target shorter than `deferral_s`, it is the latest start that meets the target:
        `arrived_s + slo.ttft_s - service_s`. Otherwise it is `arrived_s + deferral_s`.
        """
        ttft_s, deferral_s = request.slo.ttft_s, self._deferral_s
        request.start_by_s = request.arrived_s + (ttft_s - request.service_s if ttft_s < deferral_s else deferral_s)

    def _check_ttft(self, request: QueuedRequest, prediction: PromptPrediction, others: int) -> Refused | None:
        """Return an error if the first token would miss its target, else None.

        It misses the target if `time since arrival + wait + ttft > target / margin`, where `wait` is the longer one of
        `work ahead / prefill workers` and the time until a decode worker has capacity. A target longer than the
        deferral is not checked.
        """
        target_s, slo = request.slo.ttft_s, request.slo.name
        if target_s > self._deferral_s:
            return None
        limit_s = target_s / prediction.worker.margin
        waited_s, (ahead_s, answers) = self._clock() - request.arrived_s, self._queue.ahead(request)
        wait_s = ahead_s / max(1, self._policy.prefill_workers(request, self._fleet))
        if request.decodes:
            wait_s = max(wait_s, self._policy.decode_wait_s(request, self._fleet, answers + others))
        ttft_s = waited_s + wait_s + prediction.ttft_s
        if ttft_s <= limit_s:
            return None
        if prediction.compute_s > limit_s:
            return Refused(
                Refusal.SLO_TTFT,
                f"the first token takes {prediction.compute_s:.2g} s with nothing before it, class {slo!r} promises it"
                f" within {target_s:g} s; send a shorter prompt or choose another class",
            )
        hint_s = max(ttft_s - limit_s, _RETRY_MIN_S)
        return Refused(
            Refusal.SLO_TTFT,
            f"the first token would come after about {ttft_s:.2g} s, class {slo!r} promises it within {target_s:g} s;"
            f" try again in {hint_s:.2g} s or choose another class",
            retry_after_s=hint_s,
        )

    def _check_itl(self, request: QueuedRequest, others: int) -> Refused | None:
        """Return an error if the inter-token gaps would miss their target on the best worker, else None.

        An answer that would miss its target on that worker even alone is not rejected. The retry hint is the time until
        enough answers have ended:

            (step - target) / (step - alone) · mean tokens · step
        """
        if not request.decodes or not request.slo.has_gap_target:
            return None
        ahead = self._queue.ahead(request)[1] + others
        answer = self._policy.predict_answer(request, self._fleet, ahead)
        if answer is None or not answer.step_s > answer.target_s >= answer.alone_s:
            return None  # the target is met, or missed even without other answers: rejecting would not help
        excess = (answer.step_s - answer.target_s) / (answer.step_s - answer.alone_s)
        hint_s = max(excess * request.mean_tokens * answer.step_s, _RETRY_MIN_S)
        return Refused(
            Refusal.SLO_ITL,
            f"tokens would come every {1e3 * answer.step_s:.2g} ms with one answer more, class {request.slo.name!r} is"
            f" kept up to {1e3 * answer.target_s:.2g} ms; try again in {hint_s:.2g} s or choose another class",
            retry_after_s=hint_s,
        )


class RequestScheduler:
    """Assigns requests to workers as late as possible: when a worker has capacity for the next request.

    The dispatcher owns it; all calls come on the event loop.
    """

    def __init__(self, config: RouterConfig, policy: PlacementPolicy, fleet: Fleet, clock: Clock) -> None:
        self._limit, self._tenant_limit = config.max_queued_requests, config.tenant_queue_limit
        self._retry_after_s = config.retry_after_s
        self._policy, self._fleet, self._clock = policy, fleet, clock
        self.queue = RequestQueue()
        """The waiting requests; a request whose attempt failed or was refused returns to its old position."""
        self._admission = AdmissionController(policy, fleet, self.queue, clock, config.max_deferral_s)
        self._lengths = AnswerLengths()
        self._passed = set[str]()
        """The tenants that are passed over, because their next request waits for earlier prompts of the same tenant."""
        self._seen_changes = 0
        """The value of `Fleet.changes` when skipped requests were last restored to the queue."""

    def enter(self, request: QueuedRequest, *, more: int = 0, held: int = 0, held_own: int = 0) -> None:
        """Queue a new request. Raises `Refused` if the queue is full or the request's targets cannot be met.

        Answers that are not queued yet count towards the limits of the queue: `more` is the number of further answers
        of the same call, and `held` the number of answers of earlier calls, of which `held_own` belong to the same
        tenant.
        """
        if len(self.queue) + more + held >= self._limit:
            message = f"{self._limit} requests are waiting, the most this router queues; try again later"
            raise Refused(Refusal.QUEUE_FULL, message, retry_after_s=self._retry_after_s)
        if self.queue.count_of(request.tenant) + more + held_own >= self._tenant_limit:
            message = f"{self._tenant_limit} requests with this API key are waiting, the most of one; try again later"
            raise Refused(Refusal.TENANT_QUEUE_FULL, message, retry_after_s=self._retry_after_s)
        self.expect_answer(request)
        self._admission.admit(request, more + held)
        self.queue.push(request)

    def head(self) -> QueuedRequest | None:
        """Return the next request; None if the queue is empty or all waiting tenants are passed over.

        A request that has already missed its TTFT target becomes best effort, and goes after requests that can still
        meet their targets.
        """
        now = self._clock()
        if self._seen_changes != self._fleet.changes:
            self._seen_changes = self._fleet.changes
            self.queue.restore_skipped()
        while (request := self.queue.head(self._passed)) is not None:
            if request.resumed or now - request.arrived_s <= request.slo.ttft_s:
                return request
            self.queue.remove(request)
            self._admission.degrade(request)
            self.queue.push(request)
        self._passed.clear()
        return None

    def bind(self, request: QueuedRequest) -> Placement | None:
        """Place the request at the head and remove it from the queue; None if no worker has capacity for it now."""
        self.expect_answer(request)
        placement = self._policy.place(request, self._fleet, self._clock() - request.arrived_s)
        if placement is None:
            return None
        self.queue.remove(request)
        # The tenant is charged once for a prompt: a request that a worker refused has received no further service.
        if not request.resumed:
            self.queue.charge(request.tenant, max(0, placement.computed_tokens - request.charged))
            request.charged = max(placement.computed_tokens, request.charged)
        return placement

    def read_ahead_target(self, request: QueuedRequest) -> PeerRef | None:
        """Return the worker that would load KV of a request which waits for capacity; None if none would.

        With several prefill workers it is not known yet: the request goes to the one that has capacity first. Nothing
        is loaded if the worker has too few free pages for the request, because others would evict the loaded pages.
        """
        if len(self._fleet.prefills) != 1:
            return None
        prediction = self._policy.predict_prompt(request, self._fleet)
        if prediction is None or not prediction.reloaded or prediction.source is not None:
            return None
        worker = prediction.worker
        return worker.peer if worker.kv.held(request.prefill_tokens) <= worker.pages_free else None

    def may_pass(self, request: QueuedRequest) -> bool:
        """Return True if other requests may overtake the request at the head, which `bind` could not place.

        A request that no worker could serve is skipped until the fleet changes. If a request waits only for earlier
        prompts of its tenant, the other tenants may overtake it until `head` returns None. Any other request blocks the
        queue until it can be placed.
        """
        if not self._policy.could_serve(request, self._fleet):
            self.queue.skip(request)
            return True
        if not request.resumed and self._policy.waits_for_own_prompts(request, self._fleet):
            self._passed.add(request.tenant)
            return True
        self._passed.clear()
        return False

    def generated(self, request: QueuedRequest, answer_tokens: int) -> None:
        """Charge the tenant for the new tokens of a running answer, which has `answer_tokens` tokens so far."""
        if answer_tokens > request.charged_answer:
            self.queue.charge(request.tenant, answer_tokens - request.charged_answer)
            request.charged_answer = answer_tokens

    def ended(self, request: QueuedRequest, answer_tokens: int) -> None:
        """Charge the tenant for an ended answer's new tokens, and update the statistics of answer lengths."""
        if answer_tokens:
            self.generated(request, answer_tokens)
            self._lengths.learn(request.max_tokens, answer_tokens)

    def expect_answer(self, request: QueuedRequest) -> None:
        """Set the request's `mean_tokens` and `expected_tokens` from the lengths of answers that have ended."""
        limit, to_the_limit = request.max_tokens, request.to_the_limit
        request.mean_tokens = self._lengths.mean(limit, to_the_limit=to_the_limit)
        request.expected_tokens = self._lengths.expect(limit, request.prior_output_tokens, to_the_limit=to_the_limit)


def record(request: QueuedRequest, placement: Placement, prefill: WorkerState, decode: WorkerState | None) -> None:
    """Add a placed request to the load of its workers; its decode context counts as prompt + half of the answer."""
    cached, reloaded = placement.cached_tokens, placement.prompt.reloaded_tokens
    work = PromptWork(request.prefill_tokens - cached, cached, request.tenant, reloaded, placement.reload_pages)
    prefill.add_prompt(request.internal_id, work)
    if decode is not None:
        pages = decode.kv.held(request.reserved_tokens, decoding=prefill is not decode)
        context = (request.prefill_tokens + request.reserved_tokens) // 2
        decode.add_answer(request.internal_id, AnswerWork(pages, context, request.slo, request.mean_tokens))
