"""What a prompt, and then its answer, would mean at one worker, by the worker's own step costs."""

from __future__ import annotations

import math

from costs.chunks import FIRST_GAP_STEPS, Beside, chunks
from costs.step_cost import chunk_pairs
from router.long_gaps import chance_of_more, spare_gaps
from router.slo import SloClass
from router.worker_books import WorkerBooks

MISS_S = 60.0
"""What a broken target counts beside seconds that somebody waits: more than any wait that placement could save."""


REMOTE_GAP_STEPS = FIRST_GAP_STEPS + 1
"""Steps of a decode worker for which an answer waits whose KV came from elsewhere, at most: word of it comes in the
middle of one.
"""

_NOTHING = 0.0, 0, 0.0


class PromptForecast:
    """A prompt at one worker; seconds. `cost_s` is what this costs everybody, `loss_s` the part of those that decode
    there, `broken` how many of them would miss their target between tokens.
    """

    __slots__ = (
        "broken", "cached", "compute_s", "computed", "cost_s", "last_chunk", "longest_s", "loss_s", "steps", "ttft_s",
        "worker",
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
        queue_s, queue_steps, _ = _run(worker, waiting, waiting_pairs) if waiting else _NOTHING
        pairs = waiting_pairs + chunk_pairs(fresh, cached)
        self.ttft_s, steps, longest_s = _run(worker, waiting + fresh, pairs)
        self.compute_s = self.ttft_s - queue_s
        self.steps = max(1, steps - queue_steps)
        self.loss_s, self.broken = 0.0, 0
        if worker.decode_requests:
            self.longest_s = longest_s
            lost_s = self.compute_s - (steps - queue_steps) * worker.step_s
            self.loss_s = worker.decode_requests * max(0.0, lost_s)
            if longest_s > worker.tightest_s:
                self.broken = _broken_by_prompts(worker, longest_s, self.steps)
        else:
            self.longest_s = _beside_an_answer(worker, fresh, pairs / (waiting + fresh))
        self.cost_s = self.ttft_s + self.loss_s + MISS_S * (self.broken + (self.ttft_s > late_s))


class AnswerForecast:
    """An answer at one worker, in the same terms; `step_s` is a step with it. `here_s` is what its first gap costs if
    its prompt is computed there, `slack_s` for how long it can wait for its KV if it is computed elsewhere.
    """

    __slots__ = ("cached", "cost_s", "here_s", "slack_s", "step_s", "tokens", "worker")

    def __init__(self, worker: WorkerBooks, cached: int, context: int, tokens: float, slo: SloClass) -> None:
        """An answer of about `tokens` that attends to about `context` tokens, `cached` of which the worker holds."""
        self.worker = worker
        self.cached, self.tokens = cached, tokens
        rows, before_s = worker.decode_requests, worker.step_s
        self.step_s = step_s = worker.cost.decode_step_seconds(rows + 1, worker.decode_context + context)
        broken, self.here_s, self.slack_s = 0.0, 0.0, math.inf
        if slo.has_targets:
            target_s, spare = slo.bears(worker.idle_step_s), spare_gaps(slo, tokens)
            # Prompts go on to come where some have come of late.
            often = worker.long_per_s(slo)
            broken = 1.0 if step_s > target_s else chance_of_more(spare, often * tokens * step_s) if often else 0.0
            bears_s = slo.worst_gap_s if spare else target_s
            if bears_s < math.inf:
                busy_s = max(step_s, _busy_step(worker))
                self.here_s = MISS_S * (FIRST_GAP_STEPS * busy_s > bears_s)
                self.slack_s = bears_s - REMOTE_GAP_STEPS * busy_s
        if step_s > worker.tightest_s:
            broken += _broken_by_answer(worker, step_s)
        self.cost_s = tokens * (step_s + rows * (step_s - before_s)) + MISS_S * broken


def _run(worker: WorkerBooks, tokens: int, pairs: float) -> tuple[float, int, float]:
    """Seconds and steps until `tokens` of prompts are computed beside the decode rows, and the longest step."""
    if tokens <= 0:
        return 0.0, 0, 0.0
    cost, rows, context = worker.cost, worker.decode_requests, worker.decode_context
    beside = Beside(rows, context, worker.gap_targets)
    each, pause = chunks(cost, worker.info.duty, worker.max_step_tokens, beside, pairs / tokens)
    if tokens <= each:
        seconds = cost.mixed_step_seconds(tokens, pairs, rows, context)
        return seconds + pause * worker.step_s, 1, seconds
    full, rest = divmod(tokens, each)
    longest = cost.mixed_step_seconds(each, pairs / tokens * each, rows, context)
    steps = full + (rest > 0)
    seconds = full * longest + steps * pause * worker.step_s
    if rest:
        seconds += cost.mixed_step_seconds(rest, pairs / tokens * rest, rows, context)
    return seconds, steps, longest


def _busy_step(worker: WorkerBooks) -> float:
    """A step with the prompts that wait there, 0 if there are none."""
    waiting = worker.prefill_tokens
    return _run(worker, waiting, worker.prefill_pairs)[2] if waiting else 0.0


def _beside_an_answer(worker: WorkerBooks, tokens: int, pairs_per_token: float) -> float:
    """The longest step of a prompt of `tokens` where nobody decodes, if one did."""
    each = chunks(worker.cost, worker.info.duty, worker.max_step_tokens, Beside(1, 0), pairs_per_token)
    most = min(tokens, each.tokens)
    return worker.cost.mixed_step_seconds(most, most * pairs_per_token, 1, 0)


def _broken_by_prompts(worker: WorkerBooks, gap_s: float, steps: int) -> int:
    """Answers there that `steps` steps of `gap_s` would cost their target: by one gap, or as these are more than they
    have to spare.
    """
    broken = 0
    for load in worker.slo_loads.values():
        if gap_s > load.worst_s:
            broken += load.count
        elif gap_s > load.gap_s:
            broken += load.gaps.broken_by(steps)
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
