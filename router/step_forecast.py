"""What a prompt, and then its answer, would mean at one worker, by the worker's own step costs."""

from __future__ import annotations

import math
from typing import NamedTuple

from costs.chunks import FIRST_GAP_STEPS, Beside, chunks
from costs.step_cost import chunk_pairs
from router.first_token import REMOTE_GAP_STEPS, held_until_s
from router.gap_noise import MOST
from router.long_gaps import chance_of_more
from router.placement import AnswerOutlook
from router.slo import SloClass
from router.worker_books import WorkerBooks

MISS_S = 60.0
"""What a broken target counts beside seconds that somebody waits: more than any wait that placement could save."""


class AskedAnswer(NamedTuple):
    """An answer of about `tokens` to a prompt; `spare` of its gaps may be longer than the class's target. It was asked
    for `waited_s` seconds ago.
    """

    prompt_tokens: int
    tokens: float
    slo: SloClass
    spare: int
    waited_s: float = 0.0


class PromptForecast:
    """A prompt at one worker; seconds. `cost_s` is what this costs everybody, `broken` how many of those that decode
    there would miss their target between tokens.
    """

    __slots__ = (
        "_longest_s", "_pairs_per_token", "broken", "cached", "compute_s", "computed", "cost_s", "steps", "ttft_s",
        "worker",
    )  # fmt: skip

    def __init__(self, worker: WorkerBooks, tokens: int, cached: int, late_s: float = math.inf) -> None:
        """`tokens` of a prompt, the first `cached` of which `worker` holds, behind all that waits there; a first token
        after `late_s` misses its target.
        """
        self.worker = worker
        if cached >= tokens:
            cached = tokens - 1  # the last one is computed: its logits choose the first token
        self.cached = cached
        self.computed = fresh = tokens - cached
        rows, (queue_s, queue_steps, _) = worker.decode_requests, worker.queue
        tokens = worker.prefill_tokens + fresh
        pairs = worker.prefill_pairs + chunk_pairs(fresh, cached)
        ttft_s, all_steps, longest_s = worker.prompt_steps.run(tokens, pairs)
        compute_s, more_steps = ttft_s - queue_s, all_steps - queue_steps
        self.steps = steps = more_steps if more_steps > 0 else 1
        cost_s = ttft_s
        self.broken = 0
        self._longest_s = longest_s if rows else None
        if rows:
            lost_s = compute_s - more_steps * worker.step_s
            if lost_s > 0.0:
                cost_s += rows * lost_s
            if longest_s > worker.tightest_s:
                self.broken = _broken_by_prompts(worker, longest_s, steps)
        else:
            self._pairs_per_token = pairs / tokens
        self.ttft_s, self.compute_s = ttft_s, compute_s
        self.cost_s = cost_s + MISS_S * (self.broken + (ttft_s > late_s))

    @property
    def longest_s(self) -> float:
        """The longest step as an answer beside it sees it, while the worker's books stand as they did."""
        if self._longest_s is None:
            self._longest_s = _beside_an_answer(self.worker, self.computed, self._pairs_per_token)
        return self._longest_s


class AnswerForecast:
    """An answer at one worker, in the same terms; `step_s` is a step with it. It bears `first_gap_s` between its first
    two tokens: `here_s` is what that gap costs if its prompt is computed there, `slack_s` for how long it can wait for
    its KV if it is computed elsewhere: that of `missing` tokens. A first token that comes within `held_until_s` waits
    for the second: then nothing is lost here.
    """

    __slots__ = ("cost_s", "first_gap_s", "held_until_s", "here_s", "missing", "slack_s", "step_s", "worker")

    def __init__(self, worker: WorkerBooks, cached: int, asked: AskedAnswer) -> None:
        """`cached` tokens of its prompt are held there."""
        self.worker = worker
        prompt_tokens, tokens, slo, spare, waited_s = asked
        self.missing = max(1, prompt_tokens - cached)
        rows, before_s = worker.decode_requests, worker.step_s
        # With half of the answer, while it lasts.
        context = worker.decode_context + prompt_tokens + int(tokens) // 2
        self.step_s = step_s = worker.cost.decode_step_seconds(rows + 1, context)
        broken, self.here_s = 0.0, 0.0
        self.first_gap_s = self.slack_s = self.held_until_s = math.inf
        if slo.has_targets:
            gaps = worker.gaps(slo)
            target_s = gaps.target_s
            if step_s * MOST > target_s and step_s > worker.step_target(slo):
                broken = 1.0
            elif gaps.passed:
                # Prompts go on to come where some have come of late.
                broken = chance_of_more(spare, worker.long_per_s(slo) * tokens * step_s)
            self.first_gap_s = bears_s = slo.worst_gap_s if spare else target_s
            if bears_s < math.inf:
                busy_s, keeps = max(step_s, worker.queue[2]), worker.prompt_steps.keeps_first_gaps
                if FIRST_GAP_STEPS * (step_s if keeps else busy_s) > bears_s:
                    self.here_s = MISS_S
                self.slack_s = bears_s - REMOTE_GAP_STEPS * busy_s
                self.held_until_s = held_until_s(slo, target_s if keeps else max(target_s, busy_s), waited_s)
        if step_s > worker.tightest_s:
            broken += _broken_by_answer(worker, step_s)
        self.cost_s = tokens * (step_s + rows * (step_s - before_s)) + MISS_S * broken


def answer_outlook(
    worker: WorkerBooks, asked: AskedAnswer, ahead: float, wait_s: float, usual_tokens: float
) -> AnswerOutlook:
    """Of an answer that joins this worker in `wait_s` seconds, while so many `ahead` of it do, evenly: what runs there
    ends meanwhile, and so do the first of these. Others have `usual_tokens`, and contexts as what runs there has. An
    answer that only the noise of late would make miss its target alone has nobody beside it: else the gate, shut
    further and further as noise grows, would stand open at the next long gap.
    """
    rows, own = worker.decode_requests, asked.prompt_tokens + int(asked.tokens) // 2
    life_s = usual_tokens * max(worker.step_s, worker.idle_step_s)
    overlap = wait_s / life_s if life_s > 0.0 else 0.0
    beside = rows * max(0.0, 1.0 - overlap) + (ahead / overlap if overlap > 1.0 else ahead)
    beside = min(beside, worker.max_batch_requests - 1)
    each = worker.decode_context / rows if rows else own
    cost = worker.cost
    step_s = cost.decode_step_seconds(1 + round(beside), own + int(beside * each))
    alone_s = cost.decode_step_seconds(1, own)
    target_s = worker.step_target(asked.slo)
    if target_s < alone_s <= asked.slo.step_target(worker.idle_step_s):
        target_s = alone_s
    fits_s = life_s * min(1.0, (step_s - target_s) / (step_s - alone_s)) if step_s > max(target_s, alone_s) else 0.0
    return AnswerOutlook(step_s, target_s, alone_s, fits_s)


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
