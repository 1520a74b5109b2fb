"""Chooses the cheapest feasible placement: the worker that computes the prompt and the one that decodes the answer.

The cost of a placement is defined in `router/placement/latency_model.py`, its limits in docs/decisions/placement.md.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice, product
from types import MappingProxyType
from typing import NamedTuple

from router.placement.fleet import Fleet
from router.placement.latency_model import AnswerPrediction, PromptPrediction, PullOption, exposed_transfer_s
from router.placement.prefill_reserve import NO_WORKERS, PrefillReserve
from router.placement.prefix_index import PrefixMatch
from router.placement.queue import QueuedRequest
from router.placement.worker_state import AnswerWork, WorkerState
from tandem.cost_model.prefix_reload import ReloadOption
from tandem.protocol.lifecycle.placement import PromptCost
from tandem.protocol.messages import PeerRef, PrefixSource
from tandem.protocol.mode import Mode
from tandem.protocol.prefixes import KvTier

_CANDIDATES = 2
"""Number of least loaded workers that are compared per role, and of workers with the longest cached prefixes."""
_WORST = (math.inf, math.inf)
Takes = Callable[[WorkerState], bool]


class Placement(NamedTuple):
    """The workers chosen for a request, with the predicted cost and latencies (from the placement on), in seconds.

    An immutable value that `PlacementPolicy` makes and the dispatcher keeps with the request.
    """

    prefill: PeerRef
    decode: PeerRef | None
    """The decode worker; None if the answer has only the one token that prefill samples."""
    ttft_s: float
    itl_s: float
    cached_tokens: int
    computed_tokens: int
    cost_s: float
    """The predicted seconds that all requests together lose by this placement (docs/decisions/placement.md)."""
    runner_up_s: float = math.inf
    """The cost of the second cheapest placement that misses the same number of targets; infinite if there is none."""
    prompt: PromptCost = PromptCost()
    """The tokens of the prompt by the source of their KV, and the parts of `ttft_s`."""
    source: PrefixSource | None = None
    """The worker from which the prefill worker pulls the first tokens of the prompt; None if it pulls none."""
    reload_pages: Mapping[KvTier, int] = MappingProxyType({})
    """The number of pages that the worker is to load from each tier."""


class PlacementPolicy:
    """Compares the least loaded workers with the workers that have cached most of the prompt, and chooses the cheapest.

    The dispatcher owns it and calls it on the event loop; it does no I/O.
    """

    def __init__(self, mode: Mode = Mode.ADAPTIVE) -> None:
        self.mode = mode
        self._reserve = PrefillReserve()

    def place(self, request: QueuedRequest, fleet: Fleet, waited_s: float) -> Placement | None:
        """Return the cheapest placement on workers that have capacity now; None if the request must wait.

        `waited_s` is the time since the request arrived, in seconds.
        """
        placement = self._cheapest(request, fleet, waited_s, _CANDIDATES)
        if placement is None and fleet.incompatible:
            # During a rolling update the few candidates may all be in incompatible pairs: compare all live workers.
            placement = self._cheapest(request, fleet, waited_s, len(fleet.live))
        return placement

    def could_serve(self, request: QueuedRequest, fleet: Fleet) -> bool:
        """Return True if the live workers could serve the request once they are idle.

        The workers must be ready, have enough memory for the request, be compatible with each other, and be allowed by
        the current mode.
        """
        ready = [worker for worker in fleet.live if not worker.info.not_ready]
        prefills = [worker for worker in ready if _can_prefill(worker, request)]
        if not request.decodes:
            return bool(prefills)
        decodes, allowed = [worker for worker in ready if _can_decode(worker, request)], self._allowed(fleet)
        return any(allowed(prefill, decode) for prefill, decode in product(prefills, decodes))

    def waits_for_decode(self, request: QueuedRequest, fleet: Fleet) -> bool:
        """Return True if some workers have enough memory to decode the answer, but none has capacity for it now.

        Capacity means a slot in the batch and free pages; a worker that is refusing requests has none.
        """
        able = [worker for worker in fleet.live if request.decodes and _can_decode(worker, request)]
        return bool(able) and all(worker.refusing or not _takes_decode(worker, request) for worker in able)

    def waits_for_own_prompts(self, request: QueuedRequest, fleet: Fleet) -> bool:
        """Return True if no worker takes the prompt now, because each has enough waiting prompts of this tenant.

        `WorkerState.full_tenants` contains the tenants that have reached the limit of prompt tokens on a worker.
        """
        able = [worker for worker in fleet.live if _can_prefill(worker, request)]
        return bool(able) and not any(_takes_prefill(worker, request) for worker in able)

    def prefill_workers(self, request: QueuedRequest, fleet: Fleet) -> int:
        """Return the number of workers that compute prompts of requests like this one.

        While workers are reserved for prefill, workers of both roles that are not reserved do not count.
        """
        reserved = self._reserved(request, fleet)
        return len(fleet.prefills) - (fleet.both_roles - len(reserved) if reserved else 0)

    def predict_prompt(self, request: QueuedRequest, fleet: Fleet) -> PromptPrediction | None:
        """Return the prediction with the lowest TTFT, whether or not its worker has capacity now.

        None if no live worker can prefill the request.
        """
        match, takes = fleet.prefixes.match(request.digests), partial(_can_prefill, request=request)
        candidates = _with_holders(match, fleet, _ready(fleet.prefills, takes, 1), takes)
        return min(_prompts(candidates, request, fleet, match), key=lambda prompt: prompt.ttft_s, default=None)

    def predict_answer(self, request: QueuedRequest, fleet: Fleet, ahead: int) -> AnswerPrediction | None:
        """Return the prediction with the lowest ratio of `step_s` to `target_s` over the least loaded decode workers.

        `ahead` other answers are assumed to begin first, spread evenly over the decode workers. Workers on which
        the answer would miss its gap target even alone are used only if it would do so on all candidates. None if no
        worker has measured its steps yet.
        """
        measured = self._measured(request, fleet, ahead)
        predictions = [AnswerPrediction(worker, 0, request, ahead_per_worker) for worker, ahead_per_worker in measured]
        able = [prediction for prediction in predictions if prediction.alone_s <= prediction.target_s] or predictions
        return min(able, key=lambda prediction: prediction.step_s / prediction.target_s, default=None)

    def decode_wait_s(self, request: QueuedRequest, fleet: Fleet, ahead: int) -> float:
        """Return the predicted seconds until a decode worker has capacity for the answer, the least over candidates.

        `ahead` other answers are assumed to begin first, spread evenly over the decode workers. It is 0 if no worker
        has measured its steps yet.
        """
        measured = self._measured(request, fleet, ahead)
        return min((_decode_wait_s(worker, request, own_ahead) for worker, own_ahead in measured), default=0.0)

    def _measured(self, request: QueuedRequest, fleet: Fleet, ahead: int) -> list[tuple[WorkerState, float]]:
        """Return the least loaded decode workers that have measured their steps, each with its part of `ahead`."""
        reserved = self._reserved(request, fleet)
        measured = (
            worker for worker in fleet.decodes if worker.slot not in reserved and worker.cost.parameters.observed
        )
        ahead_per_worker = ahead / max(1, len(fleet.decodes) - len(reserved))
        workers = _ready(measured, partial(_can_decode, request=request), _CANDIDATES)
        return [(worker, ahead_per_worker) for worker in workers]

    def _cheapest(self, request: QueuedRequest, fleet: Fleet, waited_s: float, most: int) -> Placement | None:
        """Return the cheapest placement on the least loaded workers, at most `most` per role, and prefix holders.

        A prefix holder is a worker that has cached more pages of the prompt than the worst of these (`_with_holders`).

        A decode candidate is also a prefill candidate if the mode allows local prefill. While workers are reserved for
        prefill, only the reserved workers and workers without the decode role compute prompts.
        """
        apart, reserved = self._apart(fleet), self._reserved(request, fleet)
        match = fleet.prefixes.match(request.digests)
        answers, prefills = list[AnswerPrediction | None]([None]), list[tuple[WorkerState, int]]()

        def takes_answer(worker: WorkerState) -> bool:
            takes = worker.slot not in reserved and _takes_decode(worker, request)
            return takes and (apart or _takes_prefill(worker, request))

        def takes_prompt(worker: WorkerState) -> bool:
            allowed = not reserved or worker.slot in reserved or not worker.decodes
            return allowed and _takes_prefill(worker, request)

        # Decode candidates first: they are also the prefill candidates if a prompt must stay on its decode worker.
        if request.decodes:
            candidates = _first(fleet.decodes.with_capacity(), takes_answer, most)
            prefills = _with_holders(match, fleet, candidates, takes_answer)
            answers = [AnswerPrediction(worker, held, request) for worker, held in prefills]
        if answers and (apart or not request.decodes):
            # A worker that counts as full because of other tenants may still take a prompt of this tenant.
            candidates = _first(fleet.prefills.with_capacity(), takes_prompt, most) or _first(
                fleet.prefills, takes_prompt, most
            )
            if self._local(fleet):
                candidates += [worker for worker, _ in prefills if worker not in candidates and takes_prompt(worker)]
            prefills = _with_holders(match, fleet, candidates, takes_prompt)
        left_s = request.slo.ttft_s - waited_s
        return self._choose(_prompts(prefills, request, fleet, match, left_s), answers, fleet)

    def _choose(
        self, prompts: list[PromptPrediction], answers: Sequence[AnswerPrediction | None], fleet: Fleet
    ) -> Placement | None:
        """Return the cheapest of those allowed pairs that miss the fewest targets; None if no pair is allowed.

        `answers` is `[None]` for a request that needs no decode worker.
        """
        allowed = self._allowed(fleet)
        chosen, best, runner_up = None, _WORST, _WORST
        for answer, prompt in product(answers, prompts):
            misses, cost_s = prompt.misses, prompt.cost_s
            if answer is not None:
                misses, cost_s = misses + answer.misses, cost_s + answer.cost_s
                # The transfer only adds cost: a pair that is no better than the runner-up without it is skipped.
                if (misses, cost_s) >= runner_up or not allowed(prompt.worker, answer.worker):
                    continue
                if prompt.worker is not answer.worker:
                    cost_s += exposed_transfer_s(prompt, answer)
            if (misses, cost_s) < best:
                chosen, best, runner_up = (prompt, answer), (misses, cost_s), best
            else:
                runner_up = min(runner_up, (misses, cost_s))
        if chosen is None:
            return None
        prompt, answer = chosen
        if answer is not None:
            self._reserve.observe(prompt)
        return Placement(
            prefill=prompt.worker.peer,
            decode=None if answer is None else answer.worker.peer,
            ttft_s=prompt.ttft_s,
            itl_s=0.0 if answer is None else answer.step_s,
            cached_tokens=prompt.cached,
            computed_tokens=prompt.computed,
            cost_s=best[1],
            runner_up_s=runner_up[1] if runner_up[0] == best[0] else math.inf,
            prompt=prompt.prompt_cost,
            source=_source(prompt),
            reload_pages=prompt.reload_pages,
        )

    def _allowed(self, fleet: Fleet) -> Callable[[WorkerState, WorkerState], bool]:
        """Return a predicate of a prefill worker and a decode worker: True if they may serve one request together.

        The mode must allow it, and the workers must not have rejected each other.
        """
        local, apart, incompatible = self._local(fleet), self._apart(fleet), fleet.incompatible or None

        def allowed(prefill: WorkerState, decode: WorkerState) -> bool:
            if prefill is decode:
                return local
            return apart and (incompatible is None or incompatible.fit(prefill.peer, decode.peer))

        return allowed

    def _apart(self, fleet: Fleet) -> bool:
        """Return True if a prompt and its answer may be placed on two different workers."""
        return self.mode is not Mode.COLOCATED or not fleet.both_roles

    def _local(self, fleet: Fleet) -> bool:
        """Return True if a prompt and its answer may be placed on the same worker."""
        return self.mode is not Mode.DISAGGREGATED or len(fleet.live) == 1

    def _reserved(self, request: QueuedRequest, fleet: Fleet) -> frozenset[int]:
        """Return the slot numbers of the workers that are reserved for prefill and may not decode this answer."""
        if self.mode is not Mode.ADAPTIVE or not request.decodes or not request.slo.has_gap_target:
            return NO_WORKERS
        return self._reserve.workers(request, fleet)


def _decode_wait_s(worker: WorkerState, request: QueuedRequest, ahead: float) -> float:
    """Return the predicted seconds until `worker` has capacity for the answer, after `ahead` other answers."""
    pages = worker.kv.held(request.reserved_tokens, decoding=not worker.prefills)
    slots = worker.max_batch_requests - worker.decode_requests
    begin = max(0, min(slots, worker.answer_pages_free // max(1, pages)))
    missing = math.ceil(ahead + 1 - begin)
    if missing <= 0:
        return 0.0
    answer = AnswerWork(pages, request.decode_context, request.slo, request.mean_tokens)
    return worker.seconds_until_ended(missing, begin, answer)


def _takes_prefill(worker: WorkerState, request: QueuedRequest) -> bool:
    """Return True if `worker` has capacity for the prompt now."""
    return request.tenant not in worker.full_tenants and _can_prefill(worker, request)


def _can_prefill(worker: WorkerState, request: QueuedRequest) -> bool:
    """Return True if `worker` could compute the prompt if it were idle."""
    return worker.prefills and request.prefill_tokens <= worker.kv_tokens_total


def _takes_decode(worker: WorkerState, request: QueuedRequest) -> bool:
    """Return True if `worker` has capacity for the expected answer now, and for the longest answer if it were idle."""
    if worker.decode_full or not _can_decode(worker, request):
        return False
    return worker.kv.held(request.reserved_tokens, decoding=not worker.prefills) <= worker.answer_pages_free


def _can_decode(worker: WorkerState, request: QueuedRequest) -> bool:
    """Return True if `worker` could decode an answer of maximum length if it were idle."""
    return worker.decodes and request.kv_tokens <= worker.answer_tokens_total


def _first(workers: Iterable[WorkerState], takes: Takes, most: int) -> list[WorkerState]:
    """Return the first `most` of `workers` for which `takes` is True and which are not refusing requests."""
    return list(islice((worker for worker in workers if takes(worker) and not worker.refusing), most))


def _ready(workers: Iterable[WorkerState], takes: Takes, most: int) -> list[WorkerState]:
    """Return the first `most` of `workers` for which `takes` is True and which are ready.

    They include workers that are refusing requests because they are full, so that predictions hold under overload.
    """
    return list(islice((worker for worker in workers if takes(worker) and not worker.info.not_ready), most))


def _with_holders(
    match: PrefixMatch, fleet: Fleet, workers: list[WorkerState], takes: Takes
) -> list[tuple[WorkerState, int]]:
    """Return `workers`, and other workers that have cached more of the prompt than the worst of `workers`.

    The result is pairs (worker, prompt tokens on its device). Only the `_CANDIDATES` workers with the longest cached
    prefixes on their devices, and as many with the longest ones if tiers count, are considered for addition.
    """
    held = [(worker, match.pages(worker.slot)) for worker in workers]
    on_devices = match.longest(_CANDIDATES, min((pages for _, pages in held), default=0))
    slots = dict.fromkeys((*(slot for slot, _ in on_devices), *match.longest_with_tiers(_CANDIDATES)))
    for worker in map(fleet.worker, slots):
        if worker and worker not in workers and takes(worker) and not worker.refusing:
            held.append((worker, match.pages(worker.slot)))
    return [(worker, pages * worker.kv.page_tokens) for worker, pages in held]


def _prompts(
    candidates: Sequence[tuple[WorkerState, int]],
    request: QueuedRequest,
    fleet: Fleet,
    match: PrefixMatch,
    left_s: float = math.inf,
) -> list[PromptPrediction]:
    """Return the prediction of the prompt on each candidate, a worker and its prompt tokens on the device."""
    tokens, longest = request.prefill_tokens, match.longest(1)
    source = fleet.worker(longest[0][0]) if longest else None
    predictions = []
    for worker, held in candidates:
        reloads = _reloads(worker, request, fleet, held) if match.tiers else ()
        pull = None if source is None else _pull(worker, source, request, fleet, held=held, there=longest[0][1])
        predictions.append(PromptPrediction(worker, tokens, held, left_s, reloads, pull=pull))
    return predictions


def _pull(
    worker: WorkerState, source: WorkerState, request: QueuedRequest, fleet: Fleet, *, held: int, there: int
) -> PullOption | None:
    """Return the part of the prompt that `worker` could pull from `source`, which has its first `there` pages.

    `held` is the number of tokens on the device of `worker`. None if `source` has no more of the prompt, or cannot
    send it.
    """
    kv = worker.kv
    resident, end = held // kv.page_tokens, min(there, len(request.readable_digests(kv.page_tokens)))
    if end <= resident or worker.pulls is None or not source.live or source.kv.page_tokens != kv.page_tokens:
        return None
    if fleet.incompatible and not fleet.incompatible.fit(source.peer, worker.peer):
        return None
    pages = {KvTier.PEER: kv.missing_pages(end, resident)}
    return PullOption(source, ReloadOption((end - resident) * kv.page_tokens, pages))


def _source(prompt: PromptPrediction) -> PrefixSource | None:
    source = prompt.source
    return None if source is None else PrefixSource(source.peer, source.info.address, prompt.cached)


def _reloads(worker: WorkerState, request: QueuedRequest, fleet: Fleet, held: int) -> list[ReloadOption]:
    """Return the parts of the prompt that `worker` could load from tiers, after `held` tokens on its device."""
    if not worker.tiers:
        return []
    kv, resident = worker.kv, held // worker.kv.page_tokens
    options = []
    for end, counts in fleet.prefixes.reloads(worker.slot, request.readable_digests(kv.page_tokens), resident):
        # The index counts page numbers; a model with several groups of layers has more or fewer pages.
        pages_per_number = kv.missing_pages(end, resident) / (end - resident)
        pages = {tier: round(count * pages_per_number) for tier, count in counts.items()}
        options.append(ReloadOption((end - resident) * kv.page_tokens, pages))
    return options
