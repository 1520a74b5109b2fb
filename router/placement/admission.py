"""Decides at arrival whether a request can be served as its class promises, so that none is refused after waiting."""

from __future__ import annotations

from router.placement.fleet import Fleet
from router.placement.latency_model import Prediction
from router.placement.policy import GapPrediction, PlacementPolicy
from router.placement.queue import RequestQueue
from router.placement.queued_request import QueuedRequest
from router.refusal import Refusal, Refused
from router.slo import BEST_EFFORT, Overload

_RETRY_MIN_S, _RETRY_MAX_S = 0.1, 60.0


class AdmissionController:
    """Stands before the queue; asks the same predictions as placement. A request that was admitted is never refused
    later.
    """

    def __init__(self, policy: PlacementPolicy, fleet: Fleet, queue: RequestQueue, deferral_s: float) -> None:
        """`deferral_s`: a request without a target, or whose target is lost, goes before new ones after so long."""
        self._policy = policy
        self._fleet = fleet
        self._queue = queue
        self._deferral_s = deferral_s

    def admit(self, request: QueuedRequest, others: int = 0) -> None:
        """Set the request's place in the queue. Where its targets cannot be held, its class decides: it is served
        without targets, or `Refused` says when to retry. `others` arrive with it or before it and are not queued yet.
        """
        prediction = self._policy.predict_prompt(request, self._fleet)
        if prediction is not None:
            request.service_s = prediction.compute_s
        self.schedule(request)
        if prediction is None or not prediction.measured or not request.slo.has_targets:
            return
        refused = self._too_late(request, prediction) or self._too_slow(request, others)
        if refused is None:
            return
        if request.slo.overload is Overload.REJECT:
            raise refused
        self.degrade(request)

    def degrade(self, request: QueuedRequest) -> None:
        """Its target is lost: it goes behind those whose is not."""
        request.slo = BEST_EFFORT
        self.schedule(request)

    def schedule(self, request: QueuedRequest) -> None:
        """Set when it must start: `arrival + target - computation`. Those without a target go in order of arrival."""
        if request.slo.ttft_s < self._deferral_s:
            request.start_by_s = request.arrived_s + request.slo.ttft_s - request.service_s
        else:
            request.start_by_s = request.arrived_s + self._deferral_s

    def _too_late(self, request: QueuedRequest, prediction: Prediction) -> Refused | None:
        """If its first token would miss the target at every worker: `(wait + ttft) · margin > target`."""
        target_s = request.slo.ttft_s
        if target_s > self._deferral_s:
            return None
        ahead_s = self._queue.ahead(request.tenant, request.start_by_s).seconds
        wait_s = ahead_s / max(1, self._policy.prefill_workers(request, self._fleet))
        limit_s = target_s / self._margin
        if wait_s + prediction.ttft_s <= limit_s:
            return None
        return _refused_late(request, prediction, wait_s + prediction.ttft_s, limit_s)

    def _too_slow(self, request: QueuedRequest, others: int) -> Refused | None:
        """If its tokens would come too far apart at every worker."""
        if not request.decodes or not request.slo.has_gap_target:
            return None
        ahead = self._queue.ahead(request.tenant, request.start_by_s).answers + others
        gap = self._policy.predict_gap(request, self._fleet, ahead)
        return _refused_slow(request, gap) if gap is not None and gap.crowded else None

    @property
    def _margin(self) -> float:
        """That of the worker that would compute the next prompt."""
        return next((worker.cost.margin for worker in self._fleet.prefills), 1.0)


def _refused_late(request: QueuedRequest, prediction: Prediction, ttft_s: float, limit_s: float) -> Refused:
    target_s = request.slo.ttft_s
    if prediction.compute_s > limit_s:
        return Refused(
            Refusal.SLO_TTFT,
            f"the first token takes {prediction.compute_s:.2g} s with nothing before it, class "
            f"{request.slo.name!r} promises it within {target_s:g} s; send a shorter prompt or choose another class",
        )
    hint = min(max(ttft_s - limit_s, _RETRY_MIN_S), _RETRY_MAX_S)
    return Refused(
        Refusal.SLO_TTFT,
        f"the first token would come after about {ttft_s:.2g} s, class {request.slo.name!r} promises it within "
        f"{target_s:g} s; try again in {hint:.2g} s or choose another class",
        retry_after_s=hint,
    )


def _refused_slow(request: QueuedRequest, gap: GapPrediction) -> Refused:
    """The hint is when enough answers will have ended: the excess of the step is their part of it."""
    part = min(1.0, (gap.step_s - gap.target_s) / max(gap.step_s - gap.alone_s, 1e-9))
    hint = min(max(part * request.mean_tokens * gap.step_s, _RETRY_MIN_S), _RETRY_MAX_S)
    return Refused(
        Refusal.SLO_ITL,
        f"tokens would come every {1e3 * gap.step_s:.2g} ms with one answer more, class {request.slo.name!r} is kept"
        f" up to {1e3 * gap.target_s:.2g} ms; try again in {hint:.2g} s or choose another class",
        retry_after_s=hint,
    )
