"""Chooses the cheapest feasible placement: the worker that computes the prompt and the one that decodes the answer.

The cost of a placement is defined in `router/placement/latency_model.py`, its limits in docs/decisions/0014.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from itertools import islice, product
from typing import NamedTuple

from router.placement.fleet import Fleet
from router.placement.latency_model import AnswerPrediction, Prediction, PromptPrediction, exposed_transfer_s
from router.placement.prefill_reserve import NO_WORKERS, PrefillReserve
from router.placement.prefix_index import NO_MATCH
from router.placement.queue import QueuedRequest
from router.placement.worker_state import WorkerState
from wire.messages import PeerRef
from wire.mode import Mode

_CANDIDATES = 2
"""The workers of each role that are compared for their load, and as many for the prefix that they hold."""
_CONSIDERED = 32 * _CANDIDATES
"""The workers that are asked for capacity before a request waits; those behind them in the order have less."""
_STEPS_AHEAD = 2
"""The steps of prompts that may wait at a worker: its device never idles, and few requests are bound to one that turns
out slow.
"""

Takes = Callable[[WorkerState, QueuedRequest], bool]
Candidate = tuple[WorkerState, int]
"""A worker that takes the request, and the tokens of the prompt that it holds."""


class Placement(NamedTuple):
    """The chosen workers; no decode worker if none is needed."""

    prefill: PeerRef
    decode: PeerRef | None
    prediction: Prediction


class PlacementPolicy:
    """Compares the least loaded workers and those that hold most of the prompt."""

    def __init__(self, mode: Mode = Mode.ADAPTIVE) -> None:
        self._mode = mode
        self._reserve = PrefillReserve()

    def change_mode(self, mode: Mode) -> None:
        """Use `mode` from now on."""
        self._mode = mode

    def place(self, request: QueuedRequest, fleet: Fleet, waited_s: float) -> Placement | None:
        """Return the cheapest placement with capacity now for a request of this age; None = it waits."""
        found = self._cheapest(request, fleet, waited_s, _CANDIDATES)
        if found is None and fleet.incompatible:
            # The few that were compared may be of one release here and of another there.
            found = self._cheapest(request, fleet, waited_s, len(fleet.live))
        return found

    def could_serve(self, request: QueuedRequest, fleet: Fleet) -> bool:
        """Return True if live workers that this mode may choose are large enough and compatible, at any load."""
        ready = [worker for worker in fleet.live if not worker.info.not_ready]
        prefills = [each for each in ready if each.prefills and request.prefill_tokens <= each.kv_tokens_total]
        if not request.decodes:
            return bool(prefills)
        decodes = [each for each in ready if each.decodes and request.kv_tokens <= each.answer_tokens_total]
        return any(self._allowed(one, other, fleet) for one, other in product(prefills, decodes))

    def prefill_workers(self, request: QueuedRequest, fleet: Fleet) -> int:
        """Return the number of workers that share prompts like that of `request`."""
        reserved = self._reserved(request, fleet)
        workers = len(fleet.prefills)
        return workers - fleet.both_roles + len(reserved) if reserved else workers

    def predict_prompt(self, request: QueuedRequest, fleet: Fleet) -> Prediction | None:
        """Predict the soonest first token, with capacity now or not; None without a worker for it."""
        candidates = _with_holders(request, fleet, _first(fleet.prefills, _can_prefill, request, 1), _can_prefill)
        prompts = _prompts(request, candidates)
        if not prompts:
            return None
        soonest = min(prompts, key=lambda prompt: prompt.ttft_s)
        return _prediction(soonest, 0.0, soonest.ttft_s, math.inf)

    def predict_answer(self, request: QueuedRequest, fleet: Fleet, ahead: int) -> AnswerPrediction | None:
        """Predict the answer where its class is kept best, after `ahead` others; None = no measured worker."""
        reserved = self._reserved(request, fleet)
        measured = (each for each in fleet.decodes if each.slot not in reserved and each.cost.parameters.observed)
        each_ahead = ahead / max(1, len(fleet.decodes) - len(reserved))
        workers = _first(measured, _can_decode, request, _CANDIDATES)
        found = [AnswerPrediction(worker, 0, request, each_ahead) for worker in workers]
        able = [each for each in found if each.alone_s <= each.target_s] or found
        return min(able, key=lambda each: each.step_s / each.target_s, default=None)

    def _cheapest(self, request: QueuedRequest, fleet: Fleet, waited_s: float, most: int) -> Placement | None:
        left_s = request.slo.ttft_s - waited_s
        if not request.decodes:
            prompts = _prompts(request, self._prefills(request, fleet, most), left_s)
            if not prompts:
                return None
            best, *others = sorted(prompts, key=lambda prompt: prompt.cost_s)
            runner_up_s = others[0].cost_s if others else math.inf
            return Placement(best.worker.peer, None, _prediction(best, 0.0, best.cost_s, runner_up_s))
        reserved = self._reserved(request, fleet)
        answers = self._answers(request, fleet, most, reserved)
        if not answers:
            return None
        local = [answer.worker for answer in answers if self._local(fleet) and not reserved]
        if self._apart(fleet):
            prefills = self._prefills(request, fleet, most, reserved, local)
        else:
            prefills = [(answer.worker, request.prefill_tokens - answer.missing) for answer in answers]
        return self._pair(_prompts(request, prefills, left_s), answers, fleet)

    def _pair(self, prompts: list[PromptPrediction], answers: list[AnswerPrediction], fleet: Fleet) -> Placement | None:
        """Return the cheapest allowed pair."""
        local, apart, incompatible = self._local(fleet), self._apart(fleet), fleet.incompatible or None
        best, cost_s, runner_up_s = None, math.inf, math.inf
        for answer, prompt in product(answers, prompts):
            pair_s, prefill, decode = prompt.cost_s + answer.cost_s, prompt.worker, answer.worker
            if pair_s >= runner_up_s:
                continue
            if prefill is decode:
                if not local:
                    continue
            elif not apart or (incompatible and not incompatible.fit(prefill.peer, decode.peer)):
                continue
            else:
                pair_s += exposed_transfer_s(prompt, answer)
            if pair_s < cost_s:
                best, cost_s, runner_up_s = (prompt, answer), pair_s, cost_s
            elif pair_s < runner_up_s:
                runner_up_s = pair_s
        if best is None:
            return None
        prompt, answer = best
        self._reserve.observe(prompt)
        prediction = _prediction(prompt, answer.step_s, cost_s, runner_up_s)
        return Placement(prompt.worker.peer, answer.worker.peer, prediction)

    def _allowed(self, prefill: WorkerState, decode: WorkerState, fleet: Fleet) -> bool:
        """Return True if the mode and the workers' releases let these two serve one request."""
        if prefill is decode:
            return self._local(fleet)
        if not self._apart(fleet):
            return False
        return not fleet.incompatible or fleet.incompatible.fit(prefill.peer, decode.peer)

    def _apart(self, fleet: Fleet) -> bool:
        """Return True if a prompt and its answer may go to two workers."""
        return self._mode is not Mode.COLOCATED or not fleet.both_roles

    def _local(self, fleet: Fleet) -> bool:
        """Return True if both may go to one."""
        return self._mode is not Mode.DISAGGREGATED or len(fleet.live) == 1

    def _reserved(self, request: QueuedRequest, fleet: Fleet) -> frozenset[int]:
        """Return the workers that this answer may not use."""
        if self._mode is not Mode.ADAPTIVE or not request.slo.has_gap_target:
            return NO_WORKERS
        return self._reserve.workers(request, fleet)

    def _answers(
        self, request: QueuedRequest, fleet: Fleet, most: int, reserved: frozenset[int]
    ) -> list[AnswerPrediction]:
        free = (worker for worker in fleet.decodes if worker.slot not in reserved)
        takes = _takes_decode if self._apart(fleet) else _takes_both
        found = _with_holders(request, fleet, _first(free, takes, request, most), takes)
        return [AnswerPrediction(worker, held, request) for worker, held in found if worker.slot not in reserved]

    def _prefills(
        self,
        request: QueuedRequest,
        fleet: Fleet,
        most: int,
        reserved: frozenset[int] = NO_WORKERS,
        also: Collection[WorkerState] = (),
    ) -> list[Candidate]:
        """Return the `most` least loaded workers, those that hold more of the prompt, and `also`.

        While workers are reserved, only these and the workers that do not decode are considered.
        """
        free = (worker for worker in fleet.prefills if not reserved or worker.slot in reserved or not worker.decodes)
        workers = _first(free, _takes_prefill, request, most)
        workers += [worker for worker in also if worker not in workers and _takes_prefill(worker, request)]
        return _with_holders(request, fleet, workers, _takes_prefill)


def _takes_prefill(worker: WorkerState, request: QueuedRequest) -> bool:
    """Return True if the prompt may go there now."""
    has_capacity = worker.prefill_idle or worker.prefill_tokens < _STEPS_AHEAD * worker.max_step_tokens
    return has_capacity and _can_prefill(worker, request)


def _can_prefill(worker: WorkerState, request: QueuedRequest) -> bool:
    """Return True if it could take the prompt if nothing else were there."""
    return worker.prefills and request.prefill_tokens <= worker.kv_tokens_total and not worker.refusing


def _takes_decode(worker: WorkerState, request: QueuedRequest) -> bool:
    """Return True if it has capacity for the expected answer now, and ever for the longest one."""
    has_capacity = (
        worker.decode_requests < worker.max_batch_requests and request.reserved_tokens <= worker.kv_tokens_free
    )
    return has_capacity and _can_decode(worker, request)


def _can_decode(worker: WorkerState, request: QueuedRequest) -> bool:
    """Return True if it could decode the answer if nothing else were there."""
    return worker.decodes and request.kv_tokens <= worker.answer_tokens_total and not worker.refusing


def _takes_both(worker: WorkerState, request: QueuedRequest) -> bool:
    return _takes_decode(worker, request) and _takes_prefill(worker, request)


def _first(workers: Iterable[WorkerState], takes: Takes, request: QueuedRequest, most: int) -> list[WorkerState]:
    """Return the first in this order that take the request."""
    return list(islice((each for each in islice(workers, _CONSIDERED) if takes(each, request)), most))


def _with_holders(request: QueuedRequest, fleet: Fleet, workers: list[WorkerState], takes: Takes) -> list[Candidate]:
    """Return these workers, and those that hold more of the prompt than one of them."""
    match = fleet.prefixes.match(request.digests) if request.digests else NO_MATCH
    held = [(worker, match.pages(worker.slot)) for worker in workers]
    for slot, pages in match.longest(_CANDIDATES, min((pages for _, pages in held), default=0)):
        worker = fleet.worker(slot)
        if worker is not None and worker not in workers and takes(worker, request):
            held.append((worker, pages))
    return [(worker, pages * worker.page_tokens) for worker, pages in held]


def _prompts(
    request: QueuedRequest, candidates: Iterable[Candidate], left_s: float = math.inf
) -> list[PromptPrediction]:
    return [PromptPrediction(worker, request.prefill_tokens, held, left_s) for worker, held in candidates]


def _prediction(prompt: PromptPrediction, itl_s: float, cost_s: float, runner_up_s: float) -> Prediction:
    return Prediction(
        ttft_s=prompt.ttft_s,
        compute_s=prompt.compute_s,
        itl_s=itl_s,
        cached_tokens=prompt.cached,
        computed_tokens=prompt.computed,
        cost_s=cost_s,
        runner_up_s=runner_up_s,
        measured=prompt.worker.cost.parameters.observed > 0,
        margin=prompt.worker.margin,
    )
