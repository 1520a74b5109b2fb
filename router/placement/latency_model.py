"""Predicts the latencies of a request on a worker, and the cost to all requests on that worker.

    prompt: cost = ttft + decode rows · delay of their tokens             misses = 1 if ttft misses its target
            ttft = max(wait, reload) + compute
    answer: cost = tokens · (step + rows · growth of the step) / speedup  misses = answers that miss a gap target

A gap target is the maximum gap between two tokens that an SLO class allows. The misses of an answer are the answer
itself, if it misses its target, and the answers on the worker that would meet theirs without it. Every prediction of
the router is made here, from the step costs that the worker itself fits (`tandem/cost_model/step_cost.py`).
"""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from router.placement.queue import QueuedRequest
from router.placement.worker_state import WorkerState
from tandem.cost_model.chunks import ConcurrentDecode, chunks_within
from tandem.cost_model.prefix_reload import ReloadOption, best_reload
from tandem.cost_model.step_work import chunk_pairs
from tandem.protocol.lifecycle.placement import PromptCost
from tandem.protocol.prefixes import KvTier

_NO_PAGES: Mapping[KvTier, int] = MappingProxyType({})


class PullOption(NamedTuple):
    """A part of a prompt that a worker could pull from `source`, which has it on its device."""

    source: WorkerState
    option: ReloadOption


class PromptPrediction:
    """The predicted prefill of one prompt on one worker, in seconds and tokens.

    `ttft_s` is the time to the first token, `cost_s` the cost to all requests on the worker, and `misses` is 1 if the
    first token misses its target, else 0. `cached` is the number of prompt tokens whose KV is on the device or will be
    loaded, `reloaded` the number of the latter (`reload_pages` by tier), and `computed` the number of tokens to
    compute. KV is loaded from tiers, or pulled from the worker `source`. `wait_s`, `reload_s` and `compute_s` are the
    parts of `ttft_s` (`PromptCost`).
    """

    __slots__ = (
        "cached", "compute_s", "computed", "cost_s", "misses", "reload_pages", "reload_s", "reloaded", "source",
        "ttft_s", "wait_s", "worker",
    )  # fmt: skip

    def __init__(
        self,
        worker: WorkerState,
        tokens: int,
        resident: int,
        left_s: float = math.inf,
        reloads: Sequence[ReloadOption] = (),
        *,
        pull: PullOption | None = None,
    ) -> None:
        """Predict a prompt of `tokens` tokens, of which the first `resident` are on the device of `worker`.

        `reloads` are the parts of the prompt that the worker could load from tiers, `pull` is the part that it could
        pull from another worker; it loads the one that saves most. All prompts that wait on the worker are assumed to
        be computed before this prompt, and meanwhile KV is loaded. The first token meets its target if it comes within
        `left_s` seconds.
        """
        self.worker = worker
        # The last token is always computed, even if it is cached: its logits choose the first token of the answer.
        resident = min(resident, tokens - 1)
        self.reloaded, self.reload_s, self.reload_pages, self.source = 0, 0.0, _NO_PAGES, None
        saved_s = 0.0
        if reloads:
            chosen = best_reload(worker.cost, resident, worker.max_step_tokens, reloads, worker.tiers)
            if chosen.option is not None:
                self.reloaded, self.reload_pages = reloads[chosen.option]
                self.reload_s, saved_s = chosen.reload_s, chosen.saved_s
        if pull is not None and worker.pulls is not None:
            chosen = best_reload(worker.cost, resident, worker.max_step_tokens, [pull.option], [worker.pulls])
            if chosen.saved_s > saved_s:
                self.reloaded, self.reload_pages = pull.option
                self.reload_s, self.source = chosen.reload_s, pull.source
        self.cached = cached = resident + self.reloaded
        self.computed = fresh = tokens - cached
        waiting, pairs = worker.prefill_tokens, worker.prefill_pairs
        if worker.backlog is None:
            worker.backlog = prefill_time(worker, waiting, pairs) if waiting else (0.0, 0)
        self.wait_s, before_steps = worker.backlog
        self.ttft_s, steps = prefill_time(worker, waiting + fresh, pairs + chunk_pairs(fresh, cached))
        self.compute_s = self.ttft_s - self.wait_s
        self.ttft_s += max(0.0, self.reload_s - self.wait_s)
        delay_s = max(0.0, self.compute_s - (steps - before_steps) * worker.step_s)
        self.cost_s = self.ttft_s + worker.decode_requests * delay_s
        self.misses = int(self.ttft_s > left_s)

    @property
    def prompt_cost(self) -> PromptCost:
        """The tokens by the source of their KV, and the parts of `ttft_s`."""
        resident = self.cached - self.reloaded
        source = "" if self.source is None else self.source.peer.worker_id
        return PromptCost(resident, self.reloaded, self.computed, self.wait_s, self.reload_s, self.compute_s, source)


class AnswerPrediction:
    """The predicted decoding of one answer on one worker, in seconds.

    `step_s` is the time of a decode step with the answer in the batch, `target_s` the longest step that meets the
    answer's gap target, and `alone_s` the time of a step with only this answer. `cost_s` is the cost to all requests on
    the worker, `misses` the number of answers that would newly miss their gap target, this answer included, and
    `missing` the number of prompt tokens whose KV the worker does not hold.
    """

    __slots__ = ("alone_s", "cost_s", "misses", "missing", "step_s", "target_s", "worker")

    def __init__(self, worker: WorkerState, cached: int, request: QueuedRequest, ahead: float = 0.0) -> None:
        """Predict the answer of `request` on `worker`, which has cached `cached` tokens of its prompt.

        Up to `ahead` similar answers, as many as fit into the batch, are assumed to begin before this one.
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
            # The answer would miss its target even alone, but only by the safety margin: an idle worker accepts it.
            if self.target_s < self.alone_s <= worker.gap_target(request.slo):
                self.target_s = self.alone_s
        self.cost_s = request.mean_tokens * (step_s + rows * (step_s - worker.step_s)) / worker.decode_speedup
        self.misses = worker.answers_broken(step_s) + (step_s > self.target_s)


def prefill_time(worker: WorkerState, tokens: int, pairs: float) -> tuple[float, int]:
    """Return the seconds and the number of steps in which `worker` computes `tokens` > 0 prompt tokens.

    `pairs` is the number of (query, key) pairs in the attention of these tokens. The steps also contain the worker's
    current decode rows.
    """
    cost, rows, context = worker.cost, worker.decode_requests, worker.decode_context
    decode = ConcurrentDecode(rows, context)
    chunk, pause = chunks_within(worker.step_limit, cost, worker.max_step_tokens, decode, pairs / tokens)
    return cost.prefill_seconds(tokens, pairs, chunk, rows=rows, context_tokens=context, pause=pause)


def exposed_transfer_s(prompt: PromptPrediction, answer: AnswerPrediction) -> float:
    """Return the seconds that the answer waits for its KV after prefill: the part of the transfer that is not hidden.

    The pages of a chunk are transferred while the next chunk is computed, so the last chunk's transfer is never
    hidden: max(transfer of the last chunk, whole transfer - computation).
    """
    receiver, missing = answer.worker, answer.missing
    whole_s = receiver.kv.sent_pages(missing) * receiver.page_transfer_s
    last = (prompt.computed - 1) % prompt.worker.max_step_tokens + 1
    last_s = whole_s * last / missing if last < missing else whole_s
    return max(last_s, whole_s - prompt.compute_s)
