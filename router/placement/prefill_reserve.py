"""Reserves workers for prefill while the gap targets of answers leave no time for prefill chunks in decode steps.

A gap target is the maximum gap between two tokens that an SLO class allows. If answers with tight gap targets were
placed one by one, they would spread over all workers, and prompts would get only forced chunks (rare chunks that ignore
the gap targets). Therefore n workers take no such answers, where n maximizes the share of requests that are served
(docs/decisions/placement.md):

    served(n) = min(1, prefill rate of n reserved workers / arrival rate, share of answers that the others can decode)

A worker can decode only as many answers as their gap targets allow. No worker is reserved if the prefill chunks that
fit beside the answers are enough for all prompts. Without this file placement works, but the goodput of strict requests
falls to 0.82 times its value.
"""

import math
import sys
from collections.abc import Sequence

from router.placement.fleet import Fleet
from router.placement.latency_model import PromptPrediction
from router.placement.queue import QueuedRequest
from router.placement.worker_state import WorkerState
from tandem.cost_model.chunks import Chunks, ConcurrentDecode, breaks_target, chunks_within, forced_chunk, step_limit
from tandem.settings.slo import SloClass

_WINDOW_S = 10.0
"""The time constant of the mean arrival rate of prompt tokens, in seconds."""
_REFRESH_S = _WINDOW_S / 200
"""The minimum interval between two computations of the reserved set, in seconds."""
NO_WORKERS: frozenset[int] = frozenset()


class PrefillReserve:
    """Chooses the reserved workers of each SLO class, from the measured arrival rate of prompt tokens.

    The `PlacementPolicy` owns it and calls it on the event loop. All measured workers are assumed to be equally fast.
    """

    def __init__(self) -> None:
        self._reserved: dict[SloClass, tuple[frozenset[int], float]] = {}
        """For each SLO class, the slot numbers of the reserved workers, and the time at which they were chosen."""
        self._tokens = self._known_s = 0.0
        """Sums of placed prompt tokens and of elapsed seconds, both decayed with the time constant `_WINDOW_S`."""
        self._at_s = -math.inf

    def observe(self, prompt: PromptPrediction) -> None:
        """Add a placed prompt to the arrival rate."""
        self._fade(prompt.worker.clock())
        self._tokens += prompt.computed

    def workers(self, request: QueuedRequest, fleet: Fleet) -> frozenset[int]:
        """Return the slot numbers of the reserved workers, which may not decode the answer of `request`."""
        reserved, chosen_s = self._reserved.get(request.slo, (NO_WORKERS, -math.inf))
        now = next((worker.clock() for worker in fleet.live), -math.inf)
        if now - chosen_s >= _REFRESH_S:
            self._fade(now)
            reserved = self._choose(request, fleet, reserved)
            self._reserved[request.slo] = reserved, now
        return reserved

    def _choose(self, request: QueuedRequest, fleet: Fleet, before: frozenset[int]) -> frozenset[int]:
        measured = [worker for worker in fleet.live if worker.cost.parameters.observed and not worker.info.not_ready]
        decoding = [worker for worker in measured if worker.decodes]
        both = [worker for worker in decoding if worker.prefills]
        if len(both) < 2 or not self._tokens or not self._known_s:
            return NO_WORKERS
        arriving = self._tokens / self._known_s
        alone = _prefill_rate(both[0], request, Chunks(both[0].max_step_tokens), ConcurrentDecode(0, 0))
        elsewhere = alone * (len(measured) - len(decoding))
        # Reserved workers are released only if twice as many answers would still leave enough time for prefill: the
        # number of answers fluctuates, and the reserved set would otherwise change all the time.
        shared = _shared_prefill_rate(decoding, request, 2.0 if before else 1.0)
        served, count = (elsewhere + len(both) * shared) / arriving, 0
        if served >= 1.0:
            return NO_WORKERS
        # The share of all answers that one worker could decode within the gap target.
        like, answers = decoding[0], 1 + sum(worker.decode_requests for worker in decoding)
        context = request.decode_context + sum(worker.decode_context for worker in decoding)
        rows = like.cost.rows_within(like.step_target(request.slo), context / answers)
        limit = min(rows, like.max_batch_requests) / answers
        for more in range(1, len(decoding)):
            share = min(1.0, (elsewhere + more * alone) / arriving, (len(decoding) - more) * limit)
            if share > served:
                served, count = share, more
        order = sorted(both, key=lambda worker: (worker.slot not in before, worker.decode_requests, worker.slot))
        return frozenset(worker.slot for worker in order[:count])

    def _fade(self, now: float) -> None:
        passed_s, self._at_s = now - self._at_s, now
        kept = math.exp(-passed_s / _WINDOW_S)
        self._tokens *= kept
        self._known_s = self._known_s * kept + (_WINDOW_S * (1 - kept) if passed_s < math.inf else 0.0)


def _prefill_rate(worker: WorkerState, request: QueuedRequest, chunk: Chunks, decode: ConcurrentDecode) -> float:
    """Return the prompt tokens per second of `worker` with prefill chunks `chunk` and the decode rows `decode`."""
    tokens, (rows, context, _) = chunk.tokens, decode
    pairs = tokens * request.prefill_tokens / 2
    seconds, _ = worker.cost.prefill_seconds(
        tokens, pairs, tokens, rows=rows, context_tokens=context, pause=chunk.pause
    )
    return tokens / max(seconds, sys.float_info.epsilon)


def _shared_prefill_rate(decoding: Sequence[WorkerState], request: QueuedRequest, times: float) -> float:
    """Return the prompt tokens per second of one decode worker if all decode workers share the answers evenly.

    The number of answers is assumed to be `times` its present value, plus the answer of `request`.
    """
    like, target_s = decoding[0], decoding[0].gap_target(request.slo)
    rows = 1 + int(times * sum(worker.decode_requests for worker in decoding) / len(decoding))
    context = request.decode_context + int(times * sum(worker.decode_context for worker in decoding) / len(decoding))
    decode = ConcurrentDecode(rows, context, (target_s,))
    limit = step_limit(like.cost, like.info.assignment, decode)
    chunk = chunks_within(limit, like.cost, like.max_step_tokens, decode, request.prefill_tokens / 2)
    now_s = sum(worker.step_s for worker in decoding) / len(decoding)
    if times > 1.0 and breaks_target(target_s, now_s, like.cost.decode_step_seconds(rows, context)):
        # With `times` the answers even a plain decode step would miss the target. Then `step_limit` ignores it and
        # allows large chunks. The present answers still meet the target, so only forced chunks are assumed here.
        chunk = forced_chunk(max(1, like.max_step_tokens - rows))
    return _prefill_rate(like, request, chunk, decode)
