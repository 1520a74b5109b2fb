"""Reserves workers for prefill while the gap targets of answers leave no time for chunks in their steps.

Such answers, placed one by one, would spread over all workers and leave prompts only forced chunks. So as many workers
are reserved as let the largest share of the requests be served (docs/decisions/placement.md):

    served(n) = min(1, prefill rate of n reserved workers / arrival rate, answers that the others decode in time / all)

and none where the chunks that the answers tolerate suffice. Placement works without this file, at 0.82 of the goodput
of strict requests.
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
"""The interval at which the reserved set is computed again."""
NO_WORKERS: frozenset[int] = frozenset()


class PrefillReserve:
    """Learns the arrival rate of prompt tokens from placements. Measured workers are taken as equal."""

    def __init__(self) -> None:
        self._reserved: dict[SloClass, tuple[frozenset[int], float]] = {}
        """The workers that answers of a class may not use, and when they were chosen."""
        self._tokens = self._known_s = 0.0
        """Prompt tokens, and seconds, of about the last `_WINDOW_S`."""
        self._at_s = -math.inf

    def observe(self, prompt: PromptPrediction) -> None:
        """Count a prompt that was placed."""
        self._fade(prompt.worker.clock())
        self._tokens += prompt.computed

    def workers(self, request: QueuedRequest, fleet: Fleet) -> frozenset[int]:
        """Return the numbers of the workers that the answer of `request` may not use."""
        reserved, chosen_s = self._reserved.get(request.slo, (NO_WORKERS, -math.inf))
        now = next((worker.clock() for worker in fleet.live), -math.inf)
        if now - chosen_s >= _REFRESH_S:
            self._fade(now)
            reserved = self._choose(request, fleet, reserved)
            self._reserved[request.slo] = reserved, now
        return reserved

    def _choose(self, request: QueuedRequest, fleet: Fleet, before: frozenset[int]) -> frozenset[int]:
        measured = [each for each in fleet.live if each.cost.parameters.observed and not each.info.not_ready]
        decoding = [worker for worker in measured if worker.decodes]
        both = [worker for worker in decoding if worker.prefills]
        if len(both) < 2 or not self._tokens or not self._known_s:
            return NO_WORKERS
        arriving = self._tokens / self._known_s
        alone = _prefill_rate(both[0], request, Chunks(both[0].max_step_tokens), ConcurrentDecode(0, 0))
        elsewhere = alone * (len(measured) - len(decoding))
        # Workers are released only when twice as many answers would leave enough: answers begin and end at random.
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
        order = sorted(both, key=lambda each: (each.slot not in before, each.decode_requests, each.slot))
        return frozenset(worker.slot for worker in order[:count])

    def _fade(self, now: float) -> None:
        passed_s, self._at_s = now - self._at_s, now
        kept = math.exp(-passed_s / _WINDOW_S)
        self._tokens *= kept
        self._known_s = self._known_s * kept + (_WINDOW_S * (1 - kept) if passed_s < math.inf else 0.0)


def _prefill_rate(worker: WorkerState, request: QueuedRequest, chunk: Chunks, decode: ConcurrentDecode) -> float:
    """Return the prompt tokens per second that `worker` computes in such chunks with these decode rows."""
    tokens, (rows, context, _) = chunk.tokens, decode
    pairs = tokens * request.prefill_tokens / 2
    seconds, _ = worker.cost.prefill_seconds(
        tokens, pairs, tokens, rows=rows, context_tokens=context, pause=chunk.pause
    )
    return tokens / max(seconds, sys.float_info.epsilon)


def _shared_prefill_rate(decoding: Sequence[WorkerState], request: QueuedRequest, times: float) -> float:
    """Return the prompt tokens per second of each worker that decodes, if all share `times` as many answers evenly."""
    like, target_s = decoding[0], decoding[0].gap_target(request.slo)
    rows = 1 + int(times * sum(worker.decode_requests for worker in decoding) / len(decoding))
    context = request.decode_context + int(times * sum(worker.decode_context for worker in decoding) / len(decoding))
    decode = ConcurrentDecode(rows, context, (target_s,))
    limit = step_limit(like.cost, like.info.assignment, decode)
    chunk = chunks_within(limit, like.cost, like.max_step_tokens, decode, request.prefill_tokens / 2)
    now_s = sum(worker.step_s for worker in decoding) / len(decoding)
    if times > 1.0 and breaks_target(target_s, now_s, like.cost.decode_step_seconds(rows, context)):
        # A broken target bounds no steps, but the answers that are there would keep theirs.
        chunk = forced_chunk(max(1, like.max_step_tokens - rows))
    return _prefill_rate(like, request, chunk, decode)
