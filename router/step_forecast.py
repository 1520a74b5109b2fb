"""What a prompt, and then its answer, would mean at one worker, by the worker's own step costs."""

from __future__ import annotations

import math

from costs.step_cost import StepWork, chunk_pairs
from router.slo import SloClass
from router.worker_books import WorkerBooks

MISS_S = 60.0
"""What a broken target counts beside seconds that somebody waits: more than any wait that placement could save."""


class PromptForecast:
    """A prompt at one worker; seconds. `cost_s` is what this costs everybody, `loss_s` the part of those that decode
    there, `broken` how many of them would miss their target between tokens.
    """

    __slots__ = (
        "broken", "cached", "compute_s", "computed", "cost_s", "last_chunk", "long_steps", "loss_s", "ttft_s", "worker",
    )  # fmt: skip

    def __init__(self, worker: WorkerBooks, tokens: int, cached: int, late_s: float = math.inf) -> None:
        """`tokens` of a prompt, the first `cached` of which `worker` holds, behind all that waits there; a first token
        after `late_s` misses its target.
        """
        self.worker = worker
        self.cached = cached = min(cached, tokens - 1)  # the last one is computed: its logits choose the first token
        self.computed = fresh = tokens - cached
        self.last_chunk = (fresh - 1) % worker.max_step_tokens + 1
        waiting, waiting_pairs = worker.prefill_tokens, worker.prefill_pairs
        queue_s, queue_steps, _ = _run(worker, waiting, waiting_pairs)
        pairs = waiting_pairs + chunk_pairs(fresh, cached)
        self.ttft_s, steps, longest_s = _run(worker, waiting + fresh, pairs)
        self.compute_s = self.ttft_s - queue_s
        self.long_steps = 0
        self.loss_s, self.broken = 0.0, 0
        if worker.decode_requests:
            self.long_steps = max(1, steps - queue_steps)
            lost_s = self.compute_s - (steps - queue_steps) * worker.step_s
            self.loss_s = worker.decode_requests * max(0.0, lost_s)
            if longest_s > worker.tightest_s:
                self.broken = _broken_by_prompts(worker, longest_s, self.long_steps)
        self.cost_s = self.ttft_s + self.loss_s + MISS_S * (self.broken + (self.ttft_s > late_s))


class AnswerForecast:
    """An answer at one worker, in the same terms; `step_s` is a step with it."""

    __slots__ = ("cached", "cost_s", "step_s", "worker")

    def __init__(self, worker: WorkerBooks, cached: int, context: int, tokens: float, slo: SloClass) -> None:
        """An answer of about `tokens` that attends to about `context` tokens, `cached` of which the worker holds."""
        self.worker = worker
        self.cached = cached
        rows, before_s = worker.decode_requests, worker.step_s
        self.step_s = step_s = worker.cost.decode_step_seconds(rows + 1, worker.decode_context + context)
        broken = int(step_s > min(slo.gap_target(worker.idle_step_s), slo.worst_gap_s))
        if step_s > worker.tightest_s:
            broken += _broken_by_answer(worker, step_s)
        self.cost_s = tokens * (step_s + rows * (step_s - before_s)) + MISS_S * broken


def _run(worker: WorkerBooks, tokens: int, pairs: float) -> tuple[float, int, float]:
    """Seconds and steps until `tokens` of prompts are computed beside the decode rows, and the longest step."""
    if tokens <= 0:
        return 0.0, 0, 0.0
    rows, context, chunk = worker.decode_requests, worker.decode_context, worker.max_step_tokens
    if tokens <= chunk:
        seconds = worker.cost.seconds(StepWork(tokens, pairs, rows, context))
        return seconds, 1, seconds
    full, rest = divmod(tokens, chunk)
    longest = worker.cost.seconds(StepWork(chunk, pairs / tokens * chunk, rows, context))
    seconds = full * longest
    if rest:
        seconds += worker.cost.seconds(StepWork(rest, pairs / tokens * rest, rows, context))
    return seconds, full + (rest > 0), longest


def _broken_by_prompts(worker: WorkerBooks, gap_s: float, steps: int) -> int:
    """Answers there that `steps` steps of `gap_s` would cost their target: by one gap, or by the share of long gaps
    among those of late, of which a target at a percentile bears some.
    """
    share = (worker.long_steps + steps) * worker.step_s / worker.long_window_s
    broken = 0
    for load in worker.slo_loads.values():
        if gap_s > load.worst_s or (gap_s > load.gap_s and share > load.allowed):
            broken += load.count
    return broken


def _broken_by_answer(worker: WorkerBooks, step_s: float) -> int:
    """Answers there whose target steps of `step_s` would break. Where it is broken already, nothing more is lost:
    rather there than where nobody's is.
    """
    broken = 0
    for load in worker.slo_loads.values():
        if worker.step_s <= load.target_s < step_s:
            broken += load.count
    return broken
