"""What a request would cost at a worker: the time to its first token, the gap between its tokens, and what it delays.

Every prediction of the router is made here, from the step costs that the worker itself fits (`costs/step_cost.py`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from costs.chunks import ConcurrentDecode, chunks_within
from costs.step_cost import chunk_pairs
from router.placement.fleet import Fleet
from router.placement.queued_request import QueuedRequest
from router.placement.worker_state import WorkerState

MISS_S = 60.0
"""What a missed target counts, in seconds of somebody's waiting: more than any wait that placement could save."""


class Prediction(NamedTuple):
    """What placement expects of its choice; seconds. `ttft_s` is from the choice to the first token, `cost_s` what the
    choice costs all requests together (docs/decisions/0014), `runner_up_s` what the next best one would have cost,
    infinite without one.
    """

    ttft_s: float
    compute_s: float
    """The part of `ttft_s` in which the prompt itself is computed."""
    itl_s: float
    cached_tokens: int
    computed_tokens: int
    cost_s: float
    runner_up_s: float = math.inf
    measured: bool = True
    """Whether it rests on steps that the worker has run; False = on a guess."""


class PromptPrediction:
    """A prompt at one worker, in seconds: `ttft_s` until its first token, `compute_s` the part of it that is its own
    computation, `cost_s` what that costs all requests together.
    """

    __slots__ = ("cached", "compute_s", "computed", "cost_s", "ttft_s", "worker")

    def __init__(self, worker: WorkerState, tokens: int, cached: int, left_s: float = math.inf) -> None:
        """Of `tokens`, the first `cached` of which `worker` holds, behind all that waits there; a first token after
        `left_s` misses its target.
        """
        self.worker = worker
        # The last token is computed whatever is cached: its logits choose the first token of the answer.
        self.cached = cached = min(cached, tokens - 1)
        self.computed = fresh = tokens - cached
        waiting, pairs = worker.prefill_tokens, worker.prefill_pairs
        if worker.backlog is None:
            worker.backlog = prefill_time(worker, waiting, pairs) if waiting else (0.0, 0)
        before_s, before_steps = worker.backlog
        ttft_s, steps = prefill_time(worker, waiting + fresh, pairs + chunk_pairs(fresh, cached))
        self.ttft_s, self.compute_s = ttft_s, ttft_s - before_s
        delay_s = self.compute_s - (steps - before_steps) * worker.step_s
        self.cost_s = ttft_s + MISS_S * (ttft_s > left_s)
        if delay_s > 0.0:
            self.cost_s += worker.decode_requests * delay_s


class AnswerPrediction:
    """An answer at one worker, in seconds: `step_s` is a decode step with it, `cost_s` what it costs all requests
    together. The KV of `missing` tokens of its prompt has to come from elsewhere if its prompt is computed there.
    """

    __slots__ = ("cost_s", "missing", "step_s", "worker")

    def __init__(self, worker: WorkerState, cached: int, request: QueuedRequest) -> None:
        """`worker` holds the first `cached` tokens of its prompt."""
        self.worker = worker
        self.missing = max(1, request.prefill_tokens - cached)
        rows, before_s = worker.decode_requests, worker.step_s
        self.step_s = step_s = decode_step_s(worker, request)
        missed = worker.answers_broken(step_s)
        if request.slo.has_gap_target and step_s > worker.step_target(request.slo):
            missed += 1
        self.cost_s = request.mean_tokens * (step_s + rows * (step_s - before_s)) + MISS_S * missed


def decode_step_s(worker: WorkerState, request: QueuedRequest, ahead: float = 0.0) -> float:
    """A decode step of `worker` with the answer of `request`, and with so many more like it."""
    rows, own = worker.decode_requests + ahead, request.decode_context
    return worker.cost.decode_step_seconds(1 + round(rows), worker.decode_context + int((1 + ahead) * own))


def prefill_time(worker: WorkerState, tokens: int, pairs: float) -> tuple[float, int]:
    """Seconds and steps until `worker` has computed `tokens` > 0 of prompts with so many attention pairs, beside what
    decodes there now:

        steps · (decode rows + chunk) + steps without prompts between two chunks
    """
    cost, rows, context = worker.cost, worker.decode_requests, worker.decode_context
    each = pairs / tokens
    chunk, pause = chunks_within(worker.step_limit, cost, worker.max_step_tokens, ConcurrentDecode(rows, context), each)
    rows_s = cost.rows_seconds(rows, context)
    full, rest = divmod(tokens, chunk)
    steps = full + (rest > 0)
    seconds = steps * (1 + pause) * rows_s
    if full:
        seconds += full * cost.prompts_seconds(chunk, chunk * each, rows)
    if rest:
        seconds += cost.prompts_seconds(rest, rest * each, rows)
    return seconds, steps


def exposed_transfer_s(fleet: Fleet, prompt: PromptPrediction, answer: AnswerPrediction) -> float:
    """Seconds for which the answer waits for its KV: pages of earlier chunks are in transfer while later ones are
    computed, the last chunk's cannot be.
    """
    receiver, missing = answer.worker, answer.missing
    whole_s = receiver.transfer.seconds(fleet.kv_bytes(missing, receiver.page_tokens))
    last = (prompt.computed - 1) % prompt.worker.max_step_tokens + 1
    last_s = whole_s * last / missing if last < missing else whole_s
    return max(last_s, whole_s - prompt.compute_s)
