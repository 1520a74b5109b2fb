"""Decides at arrival whether a request can be served within its class's targets; none is rejected after waiting."""

from __future__ import annotations

from router.placement.fleet import Fleet
from router.placement.latency_model import AnswerPrediction, Prediction
from router.placement.policy import PlacementPolicy
from router.placement.queue import QueuedRequest, RequestQueue
from router.placement.worker_state import REFUSAL_PAUSE_S
from router.refusal import Refusal, Refused
from router.slo import BEST_EFFORT, Overload

_RETRY_MIN_S = 2 * REFUSAL_PAUSE_S


class AdmissionController:
    """Asks the same predictions as placement, before the queue."""

    def __init__(self, policy: PlacementPolicy, fleet: Fleet, queue: RequestQueue, deferral_s: float) -> None:
        """`deferral_s` is the time after which a request without a target goes before new ones."""
        self._policy = policy
        self._fleet = fleet
        self._queue = queue
        self._deferral_s = deferral_s

    def admit(self, request: QueuedRequest, others: int = 0) -> None:
        """Set the request's position in the queue. Where its targets cannot be kept, its class decides: it is served
        without targets, or `Refused` says when to retry. `others` arrive with it or before it and are not queued yet.
        """
        prediction = self._policy.predict_prompt(request, self._fleet)
        if prediction is not None:
            request.service_s = prediction.compute_s
        self.schedule(request)
        if prediction is None or not prediction.measured or not request.slo.has_targets:
            return
        refused = self._check_ttft(request, prediction) or self._check_itl(request, others)
        if refused is None:
            return
        if request.slo.overload is Overload.REJECT:
            raise refused
        self.degrade(request)

    def degrade(self, request: QueuedRequest) -> None:
        """Serve it without targets, after the requests that have some."""
        request.slo = BEST_EFFORT
        self.schedule(request)

    def schedule(self, request: QueuedRequest) -> None:
        """Set when its prefill must start: `arrival + target - computation`; without a target `arrival + deferral`."""
        if request.slo.ttft_s < self._deferral_s:
            request.start_by_s = request.arrived_s + request.slo.ttft_s - request.service_s
        else:
            request.start_by_s = request.arrived_s + self._deferral_s

    def _check_ttft(self, request: QueuedRequest, prediction: Prediction) -> Refused | None:
        """Return a rejection if its first token would be late:

        work ahead / prefill workers + ttft > target / margin of the prefill worker
        """
        target_s, slo = request.slo.ttft_s, request.slo.name
        if target_s > self._deferral_s:
            return None
        limit_s = target_s / prediction.margin
        ahead_s = self._queue.ahead(request.tenant, request.start_by_s).seconds
        ttft_s = ahead_s / max(1, self._policy.prefill_workers(request, self._fleet)) + prediction.ttft_s
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
        """Return a rejection if its gaps would be too long at every worker. The hint is when enough answers will have
        ended: `(step - target) / (step - step alone) · mean tokens · step`.
        """
        if not request.decodes or not request.slo.has_gap_target:
            return None
        ahead = self._queue.ahead(request.tenant, request.start_by_s).answers + others
        answer: AnswerPrediction | None = self._policy.predict_answer(request, self._fleet, ahead)
        if answer is None or not answer.crowded:
            return None
        excess = (answer.step_s - answer.target_s) / (answer.step_s - answer.alone_s)
        hint_s = max(excess * request.mean_tokens * answer.step_s, _RETRY_MIN_S)
        return Refused(
            Refusal.SLO_ITL,
            f"tokens would come every {1e3 * answer.step_s:.2g} ms with one answer more, class {request.slo.name!r} is"
            f" kept up to {1e3 * answer.target_s:.2g} ms; try again in {hint_s:.2g} s or choose another class",
            retry_after_s=hint_s,
        )
