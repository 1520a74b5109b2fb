"""Predicts the latencies of a request at a worker and what it costs all requests there.

    prompt: cost = ttft + decode rows · delay of their tokens            misses = 1 if ttft misses its target
    answer: cost = tokens · (step + rows · growth of the step) / speedup misses = gap targets broken, its own included
Every prediction of the router is made here, from the step costs that the worker itself fits
(`tandem/cost_model/step_cost.py`).
"""

import math

from router.placement.queue import QueuedRequest
from router.placement.worker_state import WorkerState
from tandem.cost_model.chunks import ConcurrentDecode, chunks_within
from tandem.cost_model.step_work import chunk_pairs


class PromptPrediction:
    """A prompt at one worker: `ttft_s`, the part `compute_s` of it for its own computation, `cost_s` and `misses`."""

    __slots__ = ("cached", "compute_s", "computed", "cost_s", "misses", "ttft_s", "worker")

    def __init__(self, worker: WorkerState, tokens: int, cached: int, left_s: float = math.inf) -> None:
        """Predict a prompt of `tokens`, the first `cached` of which `worker` holds, behind all that waits there.

        Its first token is due in `left_s`.
        """
        self.worker = worker
        # The last token is computed whatever is cached: its logits choose the first token of the answer.
        self.cached = cached = min(cached, tokens - 1)
        self.computed = fresh = tokens - cached
        waiting, pairs = worker.prefill_tokens, worker.prefill_pairs
        if worker.backlog is None:
            worker.backlog = prefill_time(worker, waiting, pairs) if waiting else (0.0, 0)
        before_s, before_steps = worker.backlog
        self.ttft_s, steps = prefill_time(worker, waiting + fresh, pairs + chunk_pairs(fresh, cached))
        self.compute_s = self.ttft_s - before_s
        delay_s = max(0.0, self.compute_s - (steps - before_steps) * worker.step_s)
        self.cost_s = self.ttft_s + worker.decode_requests * delay_s
        self.misses = int(self.ttft_s > left_s)


class AnswerPrediction:
    """An answer at one worker, in seconds.

    `step_s` is a decode step with it, `target_s` the longest step that keeps its class, `alone_s` the step if nothing
    else ran there, `cost_s` the cost to all requests, and `missing` the tokens of the prompt that are not there.
    """

    __slots__ = ("alone_s", "cost_s", "misses", "missing", "step_s", "target_s", "worker")

    def __init__(self, worker: WorkerState, cached: int, request: QueuedRequest, ahead: float = 0.0) -> None:
        """Predict the answer of `request`, of whose prompt `worker` holds `cached` tokens.

        `ahead` others like it begin before, as far as these fit into the batch.
        """
        self.worker = worker
        self.missing = max(1, request.prefill_tokens - cached)
        rows, own, cost = worker.decode_requests, request.decode_context, worker.cost
        ahead = max(0.0, min(ahead, worker.max_batch_requests - 1 - rows))
        context = worker.decode_context + int((1 + ahead) * own)
        self.step_s = step_s = cost.decode_step_seconds(1 + round(rows + ahead), context)
        self.target_s = self.alone_s = math.inf
        if request.slo.has_gap_target:
            self.alone_s = cost.decode_step_seconds(1, own)
            self.target_s = worker.step_target(request.slo)
            if self.target_s < self.alone_s <= worker.gap_target(request.slo):
                self.target_s = self.alone_s  # only the margin is why it would miss its target alone
        self.cost_s = request.mean_tokens * (step_s + rows * (step_s - worker.step_s)) / worker.decode_speedup
        self.misses = worker.answers_broken(step_s) + (step_s > self.target_s)


def prefill_time(worker: WorkerState, tokens: int, pairs: float) -> tuple[float, int]:
    """Return the seconds and steps until `worker` has computed `tokens` > 0 with these attention pairs."""
    cost, rows, context = worker.cost, worker.decode_requests, worker.decode_context
    decode = ConcurrentDecode(rows, context)
    chunk, pause = chunks_within(worker.step_limit, cost, worker.max_step_tokens, decode, pairs / tokens)
    return cost.prefill_seconds(tokens, pairs, chunk, rows=rows, context_tokens=context, pause=pause)


def exposed_transfer_s(prompt: PromptPrediction, answer: AnswerPrediction) -> float:
    """Return the seconds that the answer waits for its KV.

    The pages of all chunks but the last are in transfer while later ones are computed.
    """
    receiver, missing = answer.worker, answer.missing
    whole_s = receiver.kv.sent_pages(missing) * receiver.page_transfer_s
    last = (prompt.computed - 1) % prompt.worker.max_step_tokens + 1
    last_s = whole_s * last / missing if last < missing else whole_s
    return max(last_s, whole_s - prompt.compute_s)
