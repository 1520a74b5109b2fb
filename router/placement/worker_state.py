"""The state of one worker as this router knows it: requests in flight, load reports, learned costs, gap targets."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from tandem.cost_model.chunks import ConcurrentDecode, StepLimit, breaks_target, step_limit
from tandem.cost_model.margin import LearnedMargin
from tandem.cost_model.step_cost import StepCost
from tandem.cost_model.step_work import chunk_pairs
from tandem.protocol.ending import answer_tokens
from tandem.protocol.lifecycle.timeline import TransferStats
from tandem.protocol.messages import WorkerInfo, WorkerLoad
from tandem.settings.slo import SloClass

BACK_OFF_S = 0.05
"""The time for which a worker that refused a request is not asked again while others can serve."""
_STEPS_AHEAD = 2
"""The steps of a tenant's prompts that may wait at a worker: its device never idles, and few are bound to a slow one.

Each tenant has its own, because a worker computes the shortest prompts first: long ones of one tenant that fill a
worker would keep the short ones of the others in the router for as long as they take.
"""

Clock = Callable[[], float]
"""A clock of seconds: `time.monotonic` or a virtual one."""


class PromptWork(NamedTuple):
    """A prompt of `tenant` to compute: `tokens` tokens after `cached` ones."""

    tokens: int
    cached: int = 0
    tenant: str = ""


class AnswerWork(NamedTuple):
    """An answer to decode: `pages` by its forecast, and about `context` tokens to attend to."""

    pages: int
    context: int
    slo: SloClass


_NOTHING = (0, 0, 0)


class WorkerState:
    """One run of one worker.

    Decode rows and pages are the larger of this router's own and those of the worker's load report, which includes
    other routers'; prompt tokens are the report's and those of own prompts that it does not include yet.
    Placement reads plain attributes, which are computed when something changes: reads are far more frequent.
    """

    def __init__(self, info: WorkerInfo, clock: Clock) -> None:
        self.peer, self.clock = info.peer, clock
        self.update(info)
        self.slot = -1
        """Its number in the fleet; -1 before it joins."""
        self.live = False
        """True if it is connected and takes new work."""
        self.on_change: Callable[[WorkerState], None] | None = None
        """Called after a change of the ranks."""
        self.cost = StepCost()
        self.decode_speedup = 1.0  # see WorkerLoad
        self.page_transfer_s = 0.0
        """The mean time in which a KV page comes here from another worker, in seconds; 0 before the first transfer."""
        self._transfer_s = self._pages_received = 0.0
        self.gap_targets: tuple[float, ...] = ()
        """The longest gaps that the answers there tolerate, one per class, in seconds, sorted."""
        self._prompts: dict[str, PromptWork] = {}
        """Prompts with what is left to compute; nothing of those whose KV may still be in transfer."""
        self._unreported: dict[str, bool] = {}
        """Prompts that the last load report did not include: True if the worker has accepted the prompt since then."""
        self.prefill_tokens, self.prefill_full = 0, False
        """Prompt tokens that wait there, and True if the prompts of several tenants together fill it."""
        self.full_tenants: frozenset[str] = frozenset()
        """The tenants from which it takes no further prompt now."""
        self._answers: dict[str, AnswerWork] = {}
        self._classes: dict[SloClass, int] = {}
        """The number of answers by class."""
        self._pages = self._context = 0
        self._reported = _NOTHING
        """Prompt tokens, decode requests and pages in use, by the last load report."""
        self._fresh = False
        """True if a report came since `expire_report` was called."""
        self.backlog: tuple[float, int] | None = None
        """Seconds and steps that the waiting prompts take; None = `latency_model` computes it when needed."""
        self._refused_until_s = -math.inf
        self._step_limit: StepLimit | None = None
        self._margin: LearnedMargin | None = None
        self._last_prompt_s = -math.inf
        self.refresh()

    def add_prompt(self, request_id: str, work: PromptWork) -> None:
        """Count a prompt that is sent there."""
        self._prompts[request_id], self._unreported[request_id] = work, False
        self._refresh_prompts()

    def prompt_accepted(self, request_id: str) -> None:
        """Note that the next load report includes the prompt."""
        if request_id in self._unreported:
            self._unreported[request_id] = True

    def prompt_computed(self, request_id: str) -> None:
        """Note that nothing of the prompt is left to compute; its KV may still be in transfer."""
        if request_id in self._prompts and self._prompts[request_id].tokens:
            self._prompts[request_id] = PromptWork(0)
            self._unreported.pop(request_id, None)
            if not any(work.tokens for work in self._prompts.values()):
                self._reported = (0, *self._reported[1:])  # it may be idle now, and then sends no further report
            self._refresh_prompts()

    def remove_prompt(self, request_id: str) -> None:
        """Remove a prompt with which the worker's prefill half is done."""
        self.prompt_computed(request_id)
        self._prompts.pop(request_id, None)

    def add_answer(self, request_id: str, work: AnswerWork) -> None:
        """Count an answer that is going to be decoded there."""
        self._answers[request_id] = work
        self._count_answer(work, 1)

    def remove_answer(self, request_id: str) -> None:
        """Remove an answer of which nothing is left there."""
        work = self._answers.pop(request_id, None)
        if work is not None:
            prompts, rows, pages = self._reported  # the last report still counts it
            self._reported = (prompts, rows - 1, max(0, pages - work.pages)) if rows > 1 else (prompts, 0, 0)
            self._count_answer(work, -1)

    @property
    def request_ids(self) -> set[str]:
        """The requests that this worker is still needed for."""
        return {*self._prompts, *self._answers}

    def report(self, load: WorkerLoad) -> None:
        """Take a load report, which the worker sends after a step."""
        self._fresh, self.decode_speedup = True, load.decode_speedup
        reported = load.prefill_tokens, load.decode_requests, load.pages_used
        unreported = {each: False for each, accepted in self._unreported.items() if not accepted}
        if (load.cost, reported, unreported) != (self.cost.parameters, self._reported, self._unreported):
            self.cost, self._reported, self._unreported = StepCost(load.cost), reported, unreported
            self.refresh()

    def learn_transfer(self, transfer: TransferStats) -> None:
        """Learn from a transfer to this worker that has ended; one of no pages is ignored."""
        if transfer.pages:
            self._transfer_s += transfer.duration_nanos / 1e9
            self._pages_received += transfer.pages
            self.page_transfer_s = self._transfer_s / self._pages_received

    def update(self, info: WorkerInfo) -> None:
        """Take the facts with which the same process registered; `refresh` applies them."""
        self.info = info
        self.prefills, self.decodes = info.takes_prompts, info.takes_answers
        self.kv = info.kv_pages
        self.kv_tokens_total = self.kv.tokens_in(info.pages_total)
        """Tokens that its pages hold."""
        self.answer_tokens_total = answer_tokens(info)
        """Tokens of these that answers may reserve."""
        self.max_step_tokens, self.max_batch_requests = info.max_step_tokens, info.max_batch_requests

    def expire_report(self) -> None:
        """Drop a load report older than the last call, as a worker without work sends none. Called periodically."""
        if not self._fresh:
            self._reported = _NOTHING
            known = self._unreported
            self._unreported = {name: known.get(name, True) for name, work in self._prompts.items() if work.tokens}
            self.refresh()
        self._fresh = False

    def back_off(self) -> None:
        """Note that it refused a request."""
        self._refused_until_s = self.clock() + BACK_OFF_S

    @property
    def refusing(self) -> bool:
        """True if it refused a request within `BACK_OFF_S` or reports that it is not ready."""
        return bool(self.info.not_ready) or self.clock() < self._refused_until_s

    @property
    def margin(self) -> float:
        """Gap at the client ÷ predicted decode step, 99.5th percentile; the worker's own margin before any gap came."""
        return self.cost.margin if self._margin is None else self._margin.value

    def observe_gap(self, gap_s: float) -> None:
        """Learn the margin from a gap of one of the answers there, unless prompts waited or steps had drafts."""
        quiet = not self.prefill_tokens and self.clock() - gap_s >= self._last_prompt_s and self.decode_speedup == 1.0
        if quiet and self.step_s > 0.0 and self.cost.parameters.observed:
            self._margin = self._margin or LearnedMargin(self.cost.margin)
            self._margin.observe(gap_s / self.step_s, 1.0 / self.decode_requests)

    def gap_target(self, slo: SloClass) -> float:
        """Return the longest gap that `slo` tolerates there, in seconds; infinite = any, or not known yet."""
        return slo.gap_target(self.idle_step_s) or math.inf

    def step_target(self, slo: SloClass) -> float:
        """Return the longest predicted decode step that keeps this gap: `gap_target / margin`."""
        return self.gap_target(slo) / self.margin

    def answers_broken(self, step_s: float) -> int:
        """Return the number of answers whose target a step of `step_s` instead of `self.step_s` would break."""
        if not self.gap_targets or step_s <= self.gap_targets[0]:
            return 0
        return sum(n for slo, n in self._classes.items() if breaks_target(self.gap_target(slo), self.step_s, step_s))

    @property
    def step_limit(self) -> StepLimit:
        """The bounds of its steps that have both prompt tokens and decode rows."""
        if self._step_limit is None:
            decode = ConcurrentDecode(self.decode_requests, self.decode_context, self.gap_targets)
            self._step_limit = step_limit(self.cost, self.info.assignment, decode)
        return self._step_limit

    def refresh(self) -> None:
        """Compute all derived attributes."""
        self.idle_step_s = self.cost.idle_step_s
        """A decode step of one request with little context."""
        self._refresh_targets()
        self._refresh_answers()
        self._refresh_prompts()

    def _count_answer(self, work: AnswerWork, sign: int) -> None:
        self._pages += sign * work.pages
        self._context += sign * work.context
        before = self._classes.get(work.slo, 0)
        self._classes[work.slo] = before + sign
        if max(before, before + sign) == 1:  # the first of its class came, or the last one left
            self._classes = {slo: count for slo, count in self._classes.items() if count}
            self._refresh_targets()
        self._refresh_answers()

    def _refresh_targets(self) -> None:
        self.gap_targets = tuple(sorted(self.gap_target(slo) for slo in self._classes))

    def _refresh_prompts(self) -> None:
        own, own_pairs, by_tenant = 0, 0.0, dict[str, int]()
        for tokens, cached, tenant in self._prompts.values():
            own, own_pairs = own + tokens, own_pairs + chunk_pairs(tokens, cached)
            by_tenant[tenant] = by_tenant.get(tenant, 0) + tokens
        waiting = self._reported[0] + sum(self._prompts[each].tokens for each in self._unreported)
        if self.prefill_tokens and not waiting:
            self._last_prompt_s = self.clock()
        self.prefill_tokens, self.backlog = waiting, None
        # It takes a prompt of any length from a tenant that has none there.
        limit = _STEPS_AHEAD * self.max_step_tokens
        self.prefill_full = own > 0 and waiting >= limit
        self.full_tenants = frozenset(
            tenant for tenant, tokens in by_tenant.items() if tokens and waiting - (own - tokens) >= limit
        )
        if waiting < own:  # the last tokens of a prompt attend to the most
            self.prefill_pairs = own_pairs * (1 - (1 - waiting / own) ** 2)
        else:
            self.prefill_pairs = own_pairs * waiting / own if own else chunk_pairs(waiting, 0)
        self._rank()

    def _rank(self) -> None:
        self.prompt_rank = self.prefill_full, self.prefill_tokens + self.decode_requests
        """Its order for prompts: those with capacity first. Decode rows count as well: a prompt delays them."""
        if self.on_change is not None:
            self.on_change(self)

    def _refresh_answers(self) -> None:
        own, (_, rows, pages) = len(self._answers), self._reported
        self._step_limit = None
        self.decode_requests = rows = max(own, rows)
        pages_used = max(self._pages, pages)
        self.pages_free = self.info.pages_total - pages_used
        """Pages that are neither reserved nor in use; may be negative."""
        # The contexts of other routers' requests are not known: as long as the own ones', else as their pages.
        other = pages_used * self.kv.page_tokens // self.kv.groups if rows else 0
        self.decode_context = self._context * rows // own if own else other
        self.step_s = self.cost.decode_step_seconds(rows, self.decode_context)
        """A decode step there, in seconds."""
        step_s, free = max(self.step_s, self.idle_step_s), self.pages_free
        self.decode_full = free <= 0 or rows >= self.max_batch_requests
        """True if it takes no further answer now."""
        self.answer_rank = self.decode_full, step_s * self.info.pages_total / max(1, free)
        """Its order for answers: those with capacity first, then by step seconds / free share of pages."""
        self.backlog = None
        self._rank()
