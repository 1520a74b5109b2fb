"""The state of one worker as this router knows it: requests in flight, load reports, learned costs, latency targets.

The router adds its own requests at once, and the worker's load reports add those of other routers one step later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from tandem.cost_model.chunks import ConcurrentDecode, StepLimit, breaks_target, step_limit
from tandem.cost_model.margin import LearnedMargin
from tandem.cost_model.step_cost import StepCost
from tandem.cost_model.step_work import chunk_pairs
from tandem.protocol.ending import answer_pages, answer_tokens
from tandem.protocol.lifecycle.events import TransferStats
from tandem.protocol.messages import TierLoad, WorkerInfo, WorkerLoad
from tandem.protocol.prefixes import KvTier
from tandem.settings.slo import SloClass

BACK_OFF_S = 0.05
"""The time for which a worker that refused a request gets no new requests, in seconds."""
_STEPS_AHEAD = 2
"""Limit of one tenant's prompt tokens that wait at a worker, in full steps (`max_step_tokens`).

Two steps keep the worker's device busy, and leave most prompts in the router, where they can still go to a faster
worker. The limit applies per tenant, because a worker computes the shortest prompts first: with a common limit, one
tenant's long prompts would fill a worker, and other tenants' short prompts would wait in the router for all of them.
"""

Clock = Callable[[], float]
"""A function that returns the time in seconds: `time.monotonic` or a virtual clock."""


class PromptWork(NamedTuple):
    """The prefill work of one request of `tenant`: `tokens` tokens to compute, after `cached` cached tokens.

    The worker first loads `reloaded` of the cached tokens from tiers, in `pages` by tier, and accepts the prompt then.
    """

    tokens: int
    cached: int = 0
    tenant: str = ""
    reloaded: int = 0
    pages: Mapping[KvTier, int] = MappingProxyType({})


class AnswerWork(NamedTuple):
    """The decode work of one request.

    `pages` is the number of KV pages for its forecast length, `context` the mean number of context tokens of its steps,
    and `tokens` the mean length of similar answers.
    """

    pages: int
    context: int
    slo: SloClass
    tokens: float = 0.0


_NOTHING = (0, 0, 0)


class WorkerState:
    """The load, costs and latency targets of one worker process, as placement sees them.

    Its `WorkerLink` owns it; all calls come on the event loop. The numbers of decode rows and of pages are each the
    larger of this router's own count and the count in the worker's load report, which includes the requests of other
    routers. The number of waiting prompt tokens is that of the report, plus the tokens of this router's prompts that
    the report does not include yet. Placement reads plain attributes, computed on each change, because reads are far
    more frequent than changes.
    """

    def __init__(self, info: WorkerInfo, clock: Clock) -> None:
        self.peer, self.clock = info.peer, clock
        self.update(info)
        self.slot = -1
        """The worker's number in the fleet and the prefix index; -1 before it joins the fleet."""
        self.live = False
        """True if the worker is connected and takes new work."""
        self.on_change: Callable[[WorkerState], None] | None = None
        """Callback after a change of `prompt_rank` or `answer_rank`; the fleet sets it."""
        self.cost = StepCost()
        self.decode_speedup = 1.0
        """The speedup of decoding by draft tokens, as the worker reports it (`WorkerLoad.decode_speedup`)."""
        self._tiers: tuple[TierLoad, ...] = ()
        """The tiers of the worker's prefix cache, as it last reported them, the fastest first."""
        self._pulls: TierLoad | None = None
        """The speed of the worker's pulls from other workers, as it last reported it; None if it pulls no pages."""
        self.page_transfer_s = 0.0
        """Mean time to transfer one KV page to this worker, in seconds; 0 before the first transfer."""
        self._transfer_s = self._pages_received = 0.0
        self.gap_targets: tuple[float, ...] = ()
        """The answers' maximum inter-token gaps (`gap_target`) in seconds, one per SLO class, ascending."""
        self._prompts: dict[str, PromptWork] = {}
        """The remaining work of each prompt, by internal id; 0 tokens if it is computed and perhaps in transfer."""
        self._unreported: dict[str, bool] = {}
        """Prompts that are not included in the last load report, by internal id.

        The value is True once the worker has accepted the prompt; then the next load report includes it.
        """
        self.prefill_tokens, self.prefill_full = 0, False
        """Number of prompt tokens that wait at this worker; True if they reach the limit and some are this router's."""
        self.full_tenants: frozenset[str] = frozenset()
        """The tenants at their limit of waiting tokens here; their further prompts are not sent to the worker now."""
        self._answers: dict[str, tuple[AnswerWork, float]] = {}
        """This router's answers on the worker, each with the time of its placement in seconds, by internal id."""
        self._classes: dict[SloClass, int] = {}
        """The number of this router's answers on the worker, by SLO class."""
        self._pages = self._context = 0
        self._reported = _NOTHING
        """Prompt tokens, decode requests and pages in use, according to the last load report."""
        self._fresh = False
        """True if a load report has arrived since the last call of `expire_report`."""
        self.backlog: tuple[float, int] | None = None
        """The seconds and steps that the waiting prompts need; None until `latency_model` computes them."""
        self._refused_until_s = -math.inf
        self._step_limit: StepLimit | None = None
        self._margin: LearnedMargin | None = None
        self._last_prompt_s = -math.inf
        self.refresh()

    def add_prompt(self, request_id: str, work: PromptWork) -> None:
        """Add a prompt that the router is about to send to the worker."""
        self._prompts[request_id], self._unreported[request_id] = work, False
        self._refresh_prompts()

    def prompt_accepted(self, request_id: str) -> None:
        """Record that the worker has accepted a prompt; the worker's next load report will include the prompt."""
        if request_id in self._unreported:
            self._unreported[request_id] = True
            if self._prompts[request_id].reloaded:
                self._refresh_prompts()

    def prompt_computed(self, request_id: str) -> None:
        """Record that the whole prompt is computed; its KV transfer may still be in progress."""
        if request_id in self._prompts and self._prompts[request_id].tokens:
            self._prompts[request_id] = PromptWork(0)
            self._unreported.pop(request_id, None)
            if not any(work.tokens for work in self._prompts.values()):
                # Set to 0 here, because a worker that is idle now sends no further report.
                self._reported = (0, *self._reported[1:])
            self._refresh_prompts()

    def remove_prompt(self, request_id: str) -> None:
        """Remove a prompt that no longer depends on this worker: its KV is handed over, or its attempt has ended."""
        self.prompt_computed(request_id)
        self._prompts.pop(request_id, None)

    def add_answer(self, request_id: str, work: AnswerWork) -> None:
        """Add an answer that the worker is going to decode."""
        self._answers[request_id] = work, self.clock()
        self._count_answer(work, 1)

    def remove_answer(self, request_id: str) -> None:
        """Remove an answer that has ended or whose attempt has ended."""
        if request_id in self._answers:
            work, _ = self._answers.pop(request_id)
            # The last load report still counts the answer: subtract it, or it would occupy a row until the next one.
            prompts, rows, pages = self._reported
            self._reported = (prompts, rows - 1, max(0, pages - work.pages)) if rows > 1 else (prompts, 0, 0)
            self._count_answer(work, -1)

    @property
    def request_ids(self) -> set[str]:
        """The internal ids of the requests that still depend on this worker."""
        return {*self._prompts, *self._answers}

    def report(self, load: WorkerLoad) -> None:
        """Apply a load report, which the worker sends after a step."""
        self._fresh, self.decode_speedup = True, load.decode_speedup
        self._tiers, self._pulls = load.tiers, load.pulls
        reported = load.prefill_tokens, load.decode_requests, load.pages_used
        # The report includes the prompts that were known to be accepted before it came. The others stay unreported: the
        # worker may have made the report before it accepted them.
        unreported = {request_id: False for request_id, accepted in self._unreported.items() if not accepted}
        if (load.cost, reported, unreported) != (self.cost.parameters, self._reported, self._unreported):
            self.cost, self._reported, self._unreported = StepCost(load.cost), reported, unreported
            self.refresh()

    @property
    def tiers(self) -> tuple[TierLoad, ...]:
        """The tiers of the worker's prefix cache, the fastest first.

        A queue is the larger of the reported one and of the pages of prompts that the worker has not accepted yet.
        """
        return self._with_own(self._tiers)

    @property
    def pulls(self) -> TierLoad | None:
        """The pulls of the worker from others, with their queue like that of a tier; None if it pulls no pages."""
        return None if self._pulls is None else self._with_own((self._pulls,))[0]

    def _with_own(self, reported: tuple[TierLoad, ...]) -> tuple[TierLoad, ...]:
        loading = [self._prompts[name].pages for name, accepted in self._unreported.items() if not accepted]
        if not any(loading):
            return reported
        queued = [sum(pages.get(tier.tier, 0) for pages in loading) for tier in reported]
        return tuple(
            replace(tier, queued_pages=max(tier.queued_pages, own)) for tier, own in zip(reported, queued, strict=True)
        )

    def learn_transfer(self, transfer: TransferStats) -> None:
        """Update `page_transfer_s` from a completed transfer to this worker; a transfer of no pages is ignored."""
        if transfer.pages:
            self._transfer_s += transfer.duration_nanos / 1e9
            self._pages_received += transfer.pages
            self.page_transfer_s = self._transfer_s / self._pages_received

    def update(self, info: WorkerInfo) -> None:
        """Store the worker's latest registration; `refresh` must be called for the derived attributes to change."""
        self.info = info
        self.prefills, self.decodes = info.takes_prompts, info.takes_answers
        self.kv = info.kv_pages
        self.kv_tokens_total = self.kv.tokens_in(info.pages_total)
        """Number of tokens whose KV fits into the worker's pages."""
        self.answer_tokens_total = answer_tokens(info)
        """The part of `kv_tokens_total` that answers may reserve."""
        self._answer_pages_total = answer_pages(info)
        self.max_step_tokens, self.max_batch_requests = info.max_step_tokens, info.max_batch_requests

    def seconds_until_ended(self, count: int, more: int, work: AnswerWork) -> float:
        """Return the predicted seconds until `count` > 0 answers have ended, if `more` answers like `work` begin now.

        An answer ends when steps for its mean length have passed. Longer answers than that end as often as

            answers · speedup ÷ (mean tokens · step)

        per second. The answers of other routers count only there.
        """
        rows, now = max(1, self.decode_requests + more), self.clock()
        step_s = self.cost.decode_step_seconds(rows, self.decode_context + more * work.context) / self.decode_speedup
        left_s = [began_s + answer.tokens * step_s - now for answer, began_s in self._answers.values()]
        left_s = sorted(left_s + [work.tokens * step_s] * more)
        tokens = sum(answer.tokens for answer, _ in self._answers.values()) + more * work.tokens
        mean_s = step_s * max(1.0, tokens / len(left_s) if left_s else work.tokens)
        return max(count * mean_s / rows, left_s[count - 1] if count <= len(left_s) else 0.0)

    def expire_report(self) -> None:
        """Drop the last load report if no report has arrived since the previous call; called periodically.

        A worker without work sends no reports, so its last report would make it look busy forever.
        """
        if not self._fresh:
            self._reported = _NOTHING
            known = self._unreported
            self._unreported = {name: known.get(name, True) for name, work in self._prompts.items() if work.tokens}
            self.refresh()
        self._fresh = False

    def back_off(self) -> None:
        """Record that the worker refused a request; see `refusing`."""
        self._refused_until_s = self.clock() + BACK_OFF_S

    @property
    def refusing(self) -> bool:
        """True if the worker refused a request within the last `BACK_OFF_S` or reports that it is not ready."""
        return bool(self.info.not_ready) or self.clock() < self._refused_until_s

    @property
    def margin(self) -> float:
        """The safety factor of predicted steps: the 99.5th percentile of (gap at the client ÷ predicted decode step).

        Before the first observed gap it is the margin that the worker itself has learned.
        """
        return self.cost.margin if self._margin is None else self._margin.value

    def observe_gap(self, gap_s: float) -> None:
        """Learn the margin from a gap between two tokens of an answer on this worker, in seconds.

        A gap is ignored if prompts waited at the worker during the gap or if steps had draft tokens, because the
        prediction is that of a plain decode step.
        """
        quiet = not self.prefill_tokens and self.clock() - gap_s >= self._last_prompt_s and self.decode_speedup == 1.0
        if quiet and self.step_s > 0.0 and self.cost.parameters.observed:
            self._margin = self._margin or LearnedMargin(self.cost.margin)
            self._margin.observe(gap_s / self.step_s, 1.0 / self.decode_requests)

    def gap_target(self, slo: SloClass) -> float:
        """Return the maximum inter-token gap that `slo` allows on this worker: min(ITL target, worst gap), in seconds.

        It is infinite if the class has no such target or the target is not known yet.
        """
        return slo.gap_target(self.idle_step_s) or math.inf

    def step_target(self, slo: SloClass) -> float:
        """Return the longest predicted decode step, in seconds, that meets the gap target despite the safety factor."""
        return self.gap_target(slo) / self.margin

    def answers_broken(self, step_s: float) -> int:
        """Return the number of answers that would newly miss their gap target if steps took `step_s` seconds.

        Answers that miss their target already, with the present steps of `self.step_s` seconds, do not count.
        """
        if not self.gap_targets or step_s <= self.gap_targets[0]:
            return 0
        return sum(n for slo, n in self._classes.items() if breaks_target(self.gap_target(slo), self.step_s, step_s))

    @property
    def step_limit(self) -> StepLimit:
        """The limits of the worker's mixed steps, which contain both prompt tokens and decode rows."""
        if self._step_limit is None:
            decode = ConcurrentDecode(self.decode_requests, self.decode_context, self.gap_targets)
            self._step_limit = step_limit(self.cost, self.info.assignment, decode)
        return self._step_limit

    def refresh(self) -> None:
        """Recompute all derived attributes."""
        self.idle_step_s = self.cost.idle_step_s
        """Predicted time of a decode step with one request and little context, in seconds."""
        self._refresh_targets()
        self._refresh_answers()
        self._refresh_prompts()

    def _count_answer(self, work: AnswerWork, sign: int) -> None:
        self._pages += sign * work.pages
        self._context += sign * work.context
        before = self._classes.get(work.slo, 0)
        self._classes[work.slo] = before + sign
        if max(before, before + sign) == 1:  # this is the first answer of its class, or was the last one
            self._classes = {slo: count for slo, count in self._classes.items() if count}
            self._refresh_targets()
        self._refresh_answers()

    def _refresh_targets(self) -> None:
        self.gap_targets = tuple(sorted(self.gap_target(slo) for slo in self._classes))

    def _refresh_prompts(self) -> None:
        own, own_pairs, by_tenant = 0, 0.0, dict[str, int]()
        loading = sum(self._prompts[name].reloaded for name, accepted in self._unreported.items() if not accepted)
        for tokens, cached, tenant, *_ in self._prompts.values():
            own, own_pairs = own + tokens, own_pairs + chunk_pairs(tokens, cached)
            by_tenant[tenant] = by_tenant.get(tenant, 0) + tokens
        waiting = self._reported[0] + sum(self._prompts[request_id].tokens for request_id in self._unreported)
        if self.prefill_tokens and not waiting:
            self._last_prompt_s = self.clock()
        self.prefill_tokens, self.backlog = waiting, None
        # A tenant without prompts on this worker is never full: the worker takes one prompt of any length from it.
        # Tokens that are being loaded count as well, so that prompts wait in the router and not at a slow tier.
        limit = _STEPS_AHEAD * self.max_step_tokens - loading
        self.prefill_full = own > 0 and waiting >= limit
        self.full_tenants = frozenset(
            tenant for tenant, tokens in by_tenant.items() if tokens and waiting - (own - tokens) >= limit
        )
        # Attention pairs of the waiting tokens. The rest of a prompt has more pairs per token than its beginning, as
        # later tokens attend to more: with a share c computed, about 1 - c² of the pairs are left.
        if waiting < own:
            self.prefill_pairs = own_pairs * (1 - (1 - waiting / own) ** 2)
        else:
            self.prefill_pairs = own_pairs * waiting / own if own else chunk_pairs(waiting, 0)
        self._rank()

    def _rank(self) -> None:
        self.prompt_rank = self.prefill_full, self.prefill_tokens + self.decode_requests
        """The worker's sort key for prompts: workers with capacity first, then those with the fewest waiting tokens.

        Each decode row counts as one more token, because a prompt delays the row's tokens.
        """
        if self.on_change is not None:
            self.on_change(self)

    def _refresh_answers(self) -> None:
        own, (_, rows, pages) = len(self._answers), self._reported
        self._step_limit = None
        self.decode_requests = rows = max(own, rows)
        pages_used = max(self._pages, pages)
        self.pages_free = self.info.pages_total - pages_used
        """Number of pages that are neither reserved nor in use; may be negative."""
        # The worker's limit counts a page once for every answer that reads it, so `pages_free` does not imply it.
        self.answer_pages_free = min(self.pages_free, self._answer_pages_total - self._pages)
        """Number of pages that new answers may reserve; may be negative."""
        # The contexts of other routers' requests are unknown: they are assumed to be as long as those of this router's
        # requests, or, without any, to fill the pages in use.
        tokens_in_use = pages_used * self.kv.page_tokens // self.kv.groups if rows else 0
        self.decode_context = self._context * rows // own if own else tokens_in_use
        self.step_s = self.cost.decode_step_seconds(rows, self.decode_context)
        """Predicted time of a decode step of the current batch, in seconds."""
        step_s, free = max(self.step_s, self.idle_step_s), self.pages_free
        self.decode_full = self.answer_pages_free <= 0 or rows >= self.max_batch_requests
        """True if the worker gets no new answers now, because it has no free pages or no free slot in its batch."""
        self.answer_rank = self.decode_full, step_s * self.info.pages_total / max(1, free)
        """The worker's sort key for answers: workers with capacity first, then by step time ÷ free share of pages."""
        self.backlog = None
        self._rank()
