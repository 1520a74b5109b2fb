"""Computes the planner's input for one window from two scrapes of the cluster's metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from tandem.capacity.planner.demand import LatencyTargets
from tandem.capacity.planner.load_ratio import WorkerFacts
from tandem.capacity.planner.observation import Observation, Offered, TargetCounts
from tandem.cost_model.step_cost import StepCost
from tandem.metrics import families as f
from tandem.metrics.scrape import Scrape, ScrapeInterval
from tandem.protocol.cost_parameters import SECONDS, UNMEASURED, CostParameters
from tandem.protocol.lifecycle.spans import Phase
from tandem.protocol.messages import Role, WorkerInfo

CLASS_SHARE = 0.1
"""Minimum fraction of all requests that a service class needs for its targets to count."""
_ROUTER = "router"
_MET = "met"
_CROWDED = "slo_itl"
_REFUSED = ("queue_full", "tenant_queue_full", "slo_ttft", _CROWDED)
"""Values of the label `reason` for rejected requests that are part of the offered load (`router/refusal.py`)."""

TargetsByClass = Callable[[float], Mapping[str, LatencyTargets]]
"""Returns the targets of each service class, given the duration of a one-request decode step in seconds."""


def observe(
    interval: ScrapeInterval, workers: Sequence[WorkerInfo], targets_by_class: TargetsByClass, *, coming: int = 0
) -> Observation:
    """Return what was measured in this interval.

    `workers` are the serving workers with their latest assignment; `coming` is the number of further workers that
    start.
    """
    now = interval.now
    prefill, decode, shared = (_doing(workers, role) for role in (Role.PREFILL, Role.DECODE, Role.BOTH))
    answers = worker_facts(now, [*decode, *shared])
    idle_step_s = 0.0 if answers is None else StepCost(answers.cost).idle_step_s
    offered, names = _offered(interval), [info.peer.worker_id for info in workers]
    return Observation(
        seconds=interval.seconds,
        offered=offered,
        targets=_targets(interval, targets_by_class(idle_step_s)),
        prompts=worker_facts(now, [*prefill, *shared]),
        answers=answers,
        prefill=len(prefill),
        decode=len(decode),
        shared=len(shared),
        coming=coming,
        waiting_requests=now.total(f.REQUESTS_WAITING, role=_ROUTER),
        waiting_tokens=offered.prompt_tokens
        * sum(now.total(f.REQUESTS_WAITING, worker=worker_id) for worker_id in names),
        running_requests=sum(now.total(f.REQUESTS_RUNNING, worker=worker_id) for worker_id in names),
        kept=_kept(interval),
    )


def worker_facts(scrape: Scrape, workers: Iterable[WorkerInfo]) -> WorkerFacts | None:
    """Return the mean costs and the capacity of these workers; None if none of them has measured a step yet."""
    measured = [(info, cost) for info in workers if (cost := _cost(scrape, info.peer.worker_id)) is not None]
    if not measured:
        return None
    infos, costs = zip(*measured, strict=True)
    means: dict[str, Any] = {name: fmean(getattr(cost, name) for cost in costs) for name in SECONDS}
    free = min(cost.free_tokens for cost in costs)
    return WorkerFacts(
        CostParameters(**means, free_tokens=free, observed=1),
        fmean(info.pages_total * info.page_tokens for info in infos),
        min(info.max_batch_requests for info in infos),
        min(info.max_step_tokens for info in infos),
        max(info.model.max_context for info in infos),
        infos[0].kv_pages if infos[0].kv_pages.windowed else None,
        fmean(scrape.total(f.SPECULATION_SPEEDUP, worker=info.peer.worker_id) or 1.0 for info in infos),
    )


def fitted(scrape: Scrape) -> CostParameters | None:
    """Return the fitted costs of a whole cluster; None if prefill or decode costs are not measured yet.

    Prefill costs are means over the workers that prefill, decode costs over those that decode.
    """
    names = scrape.values(f.STEP_COST, "worker")
    roles = {name: scrape.values(f.WORKER_INFO, "role", worker=name)[0] for name in names}
    costs = {name: cost for name in names if (cost := _cost(scrape, name)) is not None}
    prompts = [costs[name] for name in costs if roles[name] != Role.DECODE]
    answers = [costs[name] for name in costs if roles[name] != Role.PREFILL]
    if not prompts or not answers:
        return None
    return CostParameters(
        base_s=fmean(cost.base_s for cost in answers),
        prompt_base_s=fmean(cost.prompt_base_s for cost in prompts),
        token_s=fmean(cost.token_s for cost in prompts),
        pair_s=fmean(cost.pair_s for cost in prompts),
        row_s=fmean(cost.row_s for cost in answers),
        context_s=fmean(cost.context_s for cost in answers),
        verify_base_s=fmean(cost.verify_base_s for cost in answers),
        free_tokens=min(cost.free_tokens for cost in prompts),
        mixed_step_margin=max(cost.mixed_step_margin for cost in answers),
        observed=1,
    )


def _cost(scrape: Scrape, worker: str) -> CostParameters | None:
    if not scrape.values(f.STEP_COST, "part", worker=worker):
        return None
    seconds: dict[str, Any] = {
        name: scrape.total(f.STEP_COST, worker=worker, part=name.removesuffix("_s")) for name in SECONDS
    }
    free = int(scrape.total(f.STEP_FREE_TOKENS, worker=worker))
    noise = scrape.total(f.STEP_MIXED_NOISE, worker=worker) or UNMEASURED.mixed_step_margin
    return CostParameters(**seconds, free_tokens=free, observed=1, mixed_step_margin=noise)


def _offered(interval: ScrapeInterval) -> Offered:
    requests = interval.grown(f.OFFERED_REQUESTS)
    if not requests:
        return Offered(0.0, 0.0, 0.0, 0.0)
    looked_up = interval.grown(f.PREFIX_QUERIES)
    return Offered(
        requests / interval.seconds,
        interval.grown(f.OFFERED_PROMPT_TOKENS) / requests,
        interval.grown(f.PREFIX_HITS) / looked_up if looked_up else 0.0,
        interval.grown(f.OFFERED_ANSWER_TOKENS) / requests,
        refused_per_s=sum(interval.grown(f.ADMISSION_REJECTIONS, reason=reason) for reason in _REFUSED)
        / interval.seconds,
        crowded_per_s=interval.grown(f.ADMISSION_REJECTIONS, reason=_CROWDED) / interval.seconds,
    )


def _targets(interval: ScrapeInterval, targets_by_class: Mapping[str, LatencyTargets]) -> LatencyTargets:
    """Return the strictest targets of the classes that have enough requests; no targets if there is no such class."""
    counts = {name: interval.grown(f.SLO_REQUESTS, slo_class=name) for name in targets_by_class}
    least = CLASS_SHARE * sum(counts.values())
    relevant = [targets for name, targets in targets_by_class.items() if counts[name] and counts[name] >= least]
    if not relevant:
        return LatencyTargets()
    return LatencyTargets(min(targets.ttft_s for targets in relevant), min(targets.gap_s for targets in relevant))


def _kept(interval: ScrapeInterval) -> TargetCounts:
    missed = {phase: interval.grown(f.SLO_MISSED, phase=phase) for phase in Phase}
    return TargetCounts(interval.grown(f.SLO_REQUESTS, outcome=_MET), missed)


def _doing(workers: Sequence[WorkerInfo], role: Role) -> list[WorkerInfo]:
    return [info for info in workers if info.open is not None and info.assigned_role is role]
