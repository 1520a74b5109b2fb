"""What this router knows of one worker: its size, what was sent there, its last load report, what its steps cost."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

from costs.chunks import NO_LIMIT, ConcurrentDecode, StepLimit, step_limit
from costs.step_cost import StepCost, chunk_pairs
from costs.transfer_cost import TransferCost
from router.placement.gap_margin import GapMargin
from router.slo import SloClass
from wire.ending import answer_tokens
from wire.messages import WorkerInfo, WorkerLoad

LOAD_FRESH_S = 1.0
"""A worker without work sends no load report: older ones no longer count."""
REFUSAL_PAUSE_S = 0.05
"""How long a worker that refused a request is not asked again while others can serve."""
_REPORT_DELAY_S = 2e-3
"""A report that arrives so soon after a worker accepted a prompt may not include it yet."""

Clock = Callable[[], float]
"""Seconds, growing; `time.monotonic` or a virtual one."""


class PromptWork(NamedTuple):
    """A prompt to compute: `tokens` behind `cached` ones whose KV is there."""

    tokens: int
    cached: int = 0

    @property
    def pairs(self) -> float:
        """Attention pairs."""
        return chunk_pairs(self.tokens, self.cached)


class AnswerWork(NamedTuple):
    """An answer to decode: `pages` at most, and about `context` tokens of KV to attend to while it lasts."""

    pages: int
    context: int
    slo: SloClass


_COMPUTED = PromptWork(0)


class LoadObserver(Protocol):
    """Keeps workers in the order of their load."""

    def prompts_changed(self, worker: WorkerState) -> None:
        """What waits in its prefill half has changed."""

    def answers_changed(self, worker: WorkerState) -> None:
        """What runs in its decode half has changed."""


class WorkerState:
    """One run of one worker. Counts are this router's own or the worker's as it reports them, whichever is larger:
    other routers send requests there, too.

    What placement reads are plain attributes, computed whenever something changes: it reads many more than change.
    """

    __slots__ = (
        "_answers", "_context", "_load", "_load_at", "_own_pairs", "_own_tokens", "_pages", "_prompts", "_ready",
        "_refused_until_s", "_reported_tokens", "_step_limit", "_targets", "_unreported", "answer_tokens_total",
        "backlog", "clock", "cost", "decode_context", "decode_requests", "decodes", "gap_margin", "gap_targets",
        "idle_step_s", "info", "kv_tokens_free", "kv_tokens_total", "live", "max_batch_requests", "max_step_tokens",
        "observer", "page_tokens", "pages_total", "pages_used", "peer", "prefill_idle", "prefill_pairs",
        "prefill_tokens", "prefills", "role", "slot", "step_s", "transfer",
    )  # fmt: skip

    def __init__(self, info: WorkerInfo, clock: Clock) -> None:
        self.info = info
        self.peer = info.peer
        self.slot = -1
        """Its number in the fleet; -1 = not in it."""
        self.live = False
        """Whether it is connected and takes new work."""
        self.observer: LoadObserver | None = None
        self.cost = StepCost()
        self.gap_margin = GapMargin()
        self.transfer = TransferCost()
        """Of KV pages that come to this worker."""
        self.gap_targets: tuple[float, ...] = ()
        """The longest gaps between tokens that the answers there tolerate, one for each class, in seconds, rising."""
        self.clock = clock
        self._prompts: dict[str, PromptWork] = {}
        self._own_tokens, self._own_pairs = 0, 0.0
        """Of these prompts, not yet computed."""
        self._reported_tokens: int | None = None
        self._unreported: dict[str, float] = {}
        """Prompts that the last report did not include, by when the worker accepted them."""
        self._answers: dict[str, AnswerWork] = {}
        self._targets: dict[SloClass, int] = {}
        """Answers there by class."""
        self._pages = 0
        self._context = 0
        self._load: WorkerLoad | None = None
        self._load_at = -math.inf
        self.backlog: tuple[float, int] | None = None
        """Seconds and steps that the prompts take which wait there; None = to be predicted (`latency_model`)."""
        self._refused_until_s: float | None = None
        self._step_limit: StepLimit | None = None
        self._refresh()

    # ---- requests in flight ----

    def add_prompt(self, request_id: str, work: PromptWork) -> None:
        """A prompt is sent there."""
        self._settle(self._prompts.get(request_id, _COMPUTED))
        self._prompts[request_id] = work
        self._unreported[request_id] = math.inf
        self._own_tokens += work.tokens
        self._own_pairs += work.pairs
        self._refresh_prompts()

    def prompt_accepted(self, request_id: str) -> None:
        """The worker has it, and its reports include it from now on."""
        if request_id in self._unreported:
            self._unreported[request_id] = self.clock()

    def prompt_computed(self, request_id: str) -> None:
        """Its prompt is computed, its KV may still be in transfer."""
        work = self._prompts.get(request_id, _COMPUTED)
        if work.tokens:
            self._prompts[request_id] = _COMPUTED
            self._unreported.pop(request_id, None)
            self._settle(work)
            self._refresh_prompts()

    def remove_prompt(self, request_id: str) -> None:
        """This worker's prefill half is done with it."""
        work = self._prompts.pop(request_id, _COMPUTED)
        self._unreported.pop(request_id, None)
        self._settle(work)
        if work.tokens:
            if not self._own_tokens:
                self._reported_tokens = None  # the worker may be idle now, and then sends no further report
            self._refresh_prompts()

    def add_answer(self, request_id: str, work: AnswerWork) -> None:
        """An answer of at most this size is going to be decoded there."""
        self._answers[request_id] = work
        count = self._targets.get(work.slo, 0)
        self._targets[work.slo] = count + 1
        if not count:
            self._refresh_targets()
        self._pages += work.pages
        self._context += work.context
        self._refresh_answers()

    def remove_answer(self, request_id: str) -> None:
        """Nothing of it is left there."""
        work = self._answers.pop(request_id, None)
        if work is None:
            return
        self._targets[work.slo] -= 1
        if not self._targets[work.slo]:
            del self._targets[work.slo]
            self._refresh_targets()
        self._pages -= work.pages
        self._context -= work.context
        self._load = None  # the last report still counts these pages
        self._refresh_answers()

    @property
    def request_ids(self) -> set[str]:
        """Requests this worker is still needed for."""
        return {*self._prompts, *self._answers}

    @property
    def idle(self) -> bool:
        """Whether nothing of this router is there."""
        return not (self._prompts or self._answers or self._pages)

    # ---- what the worker reports ----

    def report(self, load: WorkerLoad) -> None:
        """A load report, sent after a step."""
        now = self._load_at = self.clock()
        if load.cost != self.cost.parameters:
            self.cost = StepCost(load.cost)
        changed = load != self._load or load.prefill_tokens != self._reported_tokens
        if self._unreported:
            newer = {each: at for each, at in self._unreported.items() if at > now - _REPORT_DELAY_S}
            changed |= len(newer) != len(self._unreported)
            self._unreported = newer
        if changed:
            self._load, self._reported_tokens = load, load.prefill_tokens
            self._refresh()

    def learn_cost(self, cost: StepCost) -> None:
        """How long the worker's steps take, as fitted to those it ran."""
        self.cost = cost
        self._refresh()

    def update(self, info: WorkerInfo) -> None:
        """The worker registered again: other facts, the same process."""
        self.info = info
        self._refresh()

    def expire_report(self) -> None:
        """Drop a load report that is too old. Called now and then."""
        known = self._load is not None or self._reported_tokens is not None
        if known and self.clock() - self._load_at >= LOAD_FRESH_S:
            self._load = self._reported_tokens = None
            self._refresh()

    def pause(self) -> None:
        """It refused a request: others are asked first for `REFUSAL_PAUSE_S`."""
        self._refused_until_s = self.clock() + REFUSAL_PAUSE_S

    @property
    def refusing(self) -> bool:
        """Whether it refused a request a moment ago, or reports that it is not ready."""
        until_s = self._refused_until_s
        if until_s is not None and self.clock() >= until_s:
            until_s = self._refused_until_s = None
        return not self._ready or until_s is not None

    def observe_gap(self, gap_s: float) -> None:
        """One of the answers there got a token, so long after the previous one."""
        if self.cost.parameters.observed:
            rows, now = self.decode_requests, self.clock()
            self.gap_margin.observe(gap_s, self.step_s, rows, self.cost.margin, now)

    # ---- targets ----

    def gap_target(self, slo: SloClass) -> float:
        """The longest gap between tokens that `slo` tolerates there, in seconds; infinite = any, or not known yet."""
        return slo.tolerates(self.idle_step_s) or math.inf

    def step_target(self, slo: SloClass) -> float:
        """The longest predicted decode step that keeps that gap: `gap_target / margin`."""
        return self.gap_target(slo) / self.gap_margin.of(self.cost.margin)

    def answers_broken(self, step_s: float) -> int:
        """Answers whose gap target a step of `step_s` instead of `self.step_s` would break."""
        if not self.gap_targets or step_s <= self.gap_targets[0]:
            return 0
        return sum(count for slo, count in self._targets.items() if self.step_s <= self.gap_target(slo) < step_s)

    @property
    def step_limit(self) -> StepLimit:
        """The bounds of its steps that have both prompt tokens and decode rows."""
        if self._step_limit is None:
            beside = ConcurrentDecode(self.decode_requests, self.decode_context, self.gap_targets)
            self._step_limit = step_limit(self.cost, self.info.assignment, beside) if self.decode_requests else NO_LIMIT
        return self._step_limit

    # ---- derived attributes ----

    def _settle(self, work: PromptWork) -> None:
        """Nothing of this prompt is left to compute."""
        self._own_tokens -= work.tokens
        self._own_pairs = self._own_pairs - work.pairs if self._own_tokens else 0.0

    def _refresh(self) -> None:
        info = self.info
        self.role = info.role
        self._ready = not info.not_ready
        self.prefills, self.decodes = info.takes_prompts, info.takes_answers
        self.pages_total, self.page_tokens = info.pages_total, info.page_tokens
        self.kv_tokens_total = info.pages_total * info.page_tokens
        """Tokens that its pages hold."""
        self.answer_tokens_total = answer_tokens(info)
        """Those of them that answers may reserve; how many of these are left, the worker decides."""
        self.max_step_tokens, self.max_batch_requests = info.max_step_tokens, info.max_batch_requests
        self.idle_step_s = self.cost.decode_step_seconds(1, 0)
        """A decode step of one request with little context."""
        self._refresh_targets()
        self._refresh_prompts()
        self._refresh_answers()

    def _refresh_targets(self) -> None:
        self.gap_targets = tuple(sorted(self.gap_target(slo) for slo in self._targets))

    def _refresh_prompts(self) -> None:
        own, reported = self._own_tokens, self._reported_tokens
        self.backlog = None
        self.prefill_idle = own == 0
        """Whether none of this router's prompts is being computed there."""
        waiting = own if reported is None else reported + sum(self._prompts[each].tokens for each in self._unreported)
        self.prefill_tokens = waiting
        """Prompt tokens not yet computed."""
        self.gap_margin.set_prompts(waiting > 0, self.clock())
        if not own:
            self.prefill_pairs = chunk_pairs(waiting, 0)
        elif waiting >= own:
            self.prefill_pairs = self._own_pairs * waiting / own
        else:  # the last tokens of a prompt attend to the most
            self.prefill_pairs = self._own_pairs * (1 - (1 - waiting / own) ** 2)
        """Attention pairs of these."""
        if self.observer is not None:
            self.observer.prompts_changed(self)

    def _refresh_answers(self) -> None:
        load, own = self._load, len(self._answers)
        self._step_limit = self.backlog = None
        self.decode_requests = rows = max(own, load.decode_requests) if load else own
        """Requests sent there for decoding."""
        self.pages_used = max(self._pages, load.pages_used) if load else self._pages
        """Pages reserved or in use."""
        self.kv_tokens_free = (self.pages_total - self.pages_used) * self.page_tokens
        """Tokens that the other pages hold."""
        context = self._context * rows // own if own else self.pages_used * self.page_tokens if rows else 0
        self.decode_context = context
        """Tokens that a decode step there attends to; of other routers' requests only the number is known."""
        self.step_s = self.cost.decode_step_seconds(rows, context)
        """A decode step there, in seconds."""
        if self.observer is not None:
            self.observer.answers_changed(self)
