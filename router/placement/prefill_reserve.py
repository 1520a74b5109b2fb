"""Workers that take prompts and no answers, while answers tolerate no prompts beside them.

An answer whose target leaves no time for a chunk of a prompt in its steps takes a worker's whole prefill capacity, but
for rare steps. Placing requests one by one would spread such answers over all workers, until prompts have nowhere left
to be computed. So as many workers as the arriving prompts need decode none of them:

    reserved = ceil(HEADROOM · prompt tokens/s ÷ prompt tokens/s of a worker without answers)

and none where the rare steps that the answers tolerate compute that much. Measured without it: docs/decisions/0037.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from costs.chunks import ConcurrentDecode, chunks, forced_chunk
from router.placement.fleet import Fleet
from router.placement.latency_model import PromptPrediction
from router.placement.queued_request import QueuedRequest
from router.placement.worker_state import WorkerState
from router.slo import SloClass

_HEADROOM = 1.5
"""Prefill capacity that is kept / prompt tokens that arrive on average: they arrive at random, and differ in length."""
_WINDOW_S = 10.0
"""Time constant of that average, in seconds."""
NOBODY: frozenset[int] = frozenset()
_SHORTEST_S = 1e-9
_REFRESH_S = 0.05
"""How often the set is computed again."""


class PrefillReserve:
    """Learns from placements how many prompt tokens arrive. Workers that were measured count as alike."""

    def __init__(self) -> None:
        self._reserved: dict[SloClass, tuple[frozenset[int], float]] = {}
        """The workers reserved from the answers of a class, and when that was computed."""
        self._tokens = self._known_s = 0.0
        """Prompt tokens that arrived within about the last `_WINDOW_S`, and how much of it has passed."""
        self._at_s = -math.inf

    def observe(self, prompt: PromptPrediction) -> None:
        """It was placed."""
        self._fade(prompt.worker.clock())
        self._tokens += prompt.computed

    def workers(self, request: QueuedRequest, fleet: Fleet) -> frozenset[int]:
        """The numbers of the workers that the answer of `request` may not go to."""
        any_worker = next(iter(fleet.decodes), None)
        if any_worker is None:
            return NOBODY
        reserved, computed_s = self._reserved.get(request.slo, (NOBODY, -math.inf))
        if (now := any_worker.clock()) - computed_s >= _REFRESH_S:
            self._fade(now)
            reserved = self._choose(request, fleet, reserved)
            self._reserved[request.slo] = reserved, now
        return reserved

    def _choose(self, request: QueuedRequest, fleet: Fleet, before: frozenset[int]) -> frozenset[int]:
        measured = [each for each in fleet.live if each.cost.parameters.observed and not each.info.not_ready]
        both = [worker for worker in measured if worker.prefills and worker.decodes]
        if len(both) < 2 or not self._tokens or not self._known_s:
            return NOBODY
        wanted = _HEADROOM * self._tokens / self._known_s
        alone = _prefill_rate(both[0], request)
        elsewhere = alone * sum(not worker.decodes for worker in measured)
        decoding = [worker for worker in measured if worker.decodes]
        # Workers are released when twice as many answers would leave enough: answers come and end at random.
        shared = _shared_prefill_rate(decoding, request, 2.0 if before else 1.0)
        served, needed = min(1.0, (elsewhere + len(both) * shared) / wanted), 0
        if served == 1.0:
            return NOBODY
        limit = _decode_limit(decoding, request)
        for count in range(1, len(decoding)):
            part = min(1.0, (elsewhere + count * alone) / wanted, (len(decoding) - count) * limit)
            if part > served:
                served, needed = part, count
        # Those that are reserved already stay so.
        order = sorted(both, key=lambda each: (each.slot not in before, each.decode_requests, each.slot))
        return frozenset(worker.slot for worker in order[:needed])

    def _fade(self, now: float) -> None:
        passed = now - self._at_s
        self._at_s = now
        kept = math.exp(-passed / _WINDOW_S)
        self._tokens *= kept
        self._known_s = self._known_s * kept + (_WINDOW_S * (1 - kept) if passed < math.inf else 0.0)


def _prefill_rate(worker: WorkerState, request: QueuedRequest) -> float:
    """Prompt tokens a second of a worker without answers."""
    tokens = worker.max_step_tokens
    return tokens / max(worker.cost.mixed_step_seconds(tokens, tokens * request.prefill_tokens / 2, 0, 0), _SHORTEST_S)


def _decode_limit(decoding: Sequence[WorkerState], request: QueuedRequest) -> float:
    """The part of all answers that one worker could decode within the gap target of `request`."""
    like, answers = decoding[0], 1 + sum(worker.decode_requests for worker in decoding)
    context = request.decode_context + sum(worker.decode_context for worker in decoding)
    cost = like.cost
    empty_s = cost.decode_step_seconds(1, 0)
    each_s = (cost.decode_step_seconds(answers, context) - empty_s) / answers
    rows = min((like.step_target(request.slo) - empty_s) / max(each_s, _SHORTEST_S), like.max_batch_requests)
    return max(0.0, rows) / answers


def _shared_prefill_rate(decoding: Sequence[WorkerState], request: QueuedRequest, times: float) -> float:
    """Prompt tokens a second of each worker that decodes if all shared `times` as many answers evenly."""
    like, target_s = decoding[0], decoding[0].gap_target(request.slo)
    share = times / len(decoding)
    rows = 1 + int(share * sum(worker.decode_requests for worker in decoding))
    context = request.decode_context + int(share * sum(worker.decode_context for worker in decoding))
    each, cost = request.prefill_tokens / 2, like.cost
    tokens, pause = chunks(
        cost, like.info.assignment, like.max_step_tokens, ConcurrentDecode(rows, context, (target_s,)), each
    )
    now_s = sum(worker.step_s for worker in decoding) / len(decoding)
    if times > 1.0 and now_s <= target_s < cost.decode_step_seconds(rows, context):
        # A broken target bounds no steps, but the answers that are there would keep theirs.
        tokens, pause = forced_chunk(max(1, like.max_step_tokens - rows))
    seconds = cost.mixed_step_seconds(tokens, tokens * each, rows, context)
    return tokens / max(seconds + pause * cost.decode_step_seconds(rows, context), _SHORTEST_S)
