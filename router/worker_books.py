"""What this router knows of one live worker: its size, what was placed there, its last report, its costs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from costs.chunks import Beside
from costs.step_cost import StepCost
from costs.transfer_cost import TransferCost
from router.gap_noise import GapNoise
from router.long_gaps import LongGaps
from router.placed_work import AnswerWork, PromptWork
from router.prompt_queue import PromptQueue
from router.prompt_steps import NO_PROMPTS, PromptSteps, Run
from router.slo import SloClass
from router.slo_load import SloLoad
from wire.ending import answer_tokens
from wire.messages import WorkerInfo, WorkerLoad

LOAD_FRESH_S = 1.0
"""A worker without work sends no load: older reports count for nothing."""
REFUSAL_PAUSE_S = 0.05
"""How long a worker that turned a request away is not asked again, if others are there."""

Clock = Callable[[], float]
"""Seconds, growing; `time.monotonic` or a virtual one."""


class Order(Protocol):
    """Who keeps the order in which workers are asked."""

    def rank_prompts(self, worker: WorkerBooks) -> None:
        """What waits in its prefill half has changed."""

    def rank_answers(self, worker: WorkerBooks) -> None:
        """What runs in its decode half has changed."""


class WorkerBooks:
    """One run of one worker, as placement sees it. Counts are this router's own or the worker's by its own report,
    whichever is larger: other routers place work there, too.

    What placement reads are plain attributes, made whenever something changes: it reads many more than change.
    """

    __slots__ = (
        "_answers", "_context", "_gaps", "_load", "_load_at", "_pages", "_prompt_steps", "_prompts",
        "_queue", "_ready", "_refused_until_s", "answer_tokens_total", "clock", "cost", "decode_context",
        "decode_requests", "decodes", "gap_targets", "idle_step_s", "info", "kv_tokens_free", "kv_tokens_total",
        "live", "max_batch_requests", "max_step_tokens", "noise", "order", "page_tokens", "pages_total", "pages_used",
        "peer", "prefill_idle", "prefill_pairs", "prefill_tokens", "prefills", "role", "slo_loads", "slot", "step_s",
        "tightest_s", "transfer",
    )  # fmt: skip

    def __init__(self, info: WorkerInfo, clock: Clock) -> None:
        self.info = info
        self.peer = info.peer
        self.slot = -1
        """Its number in the fleet; -1 = not in it."""
        self.live = False
        """Whether it is connected and takes new work."""
        self.order: Order | None = None
        self.cost = StepCost()
        self.transfer = TransferCost()
        """Of KV pages that come to this worker."""
        self.slo_loads: dict[SloClass, SloLoad] = {}
        """The answers that were placed there for decoding."""
        self.tightest_s = math.inf
        """The smallest target between tokens among them, in seconds."""
        self.gap_targets: tuple[float, ...] = ()
        """The targets of their classes, rising."""
        self.clock = clock
        self.noise = GapNoise()
        self._prompt_steps: PromptSteps | None = None
        self._queue: Run | None = None
        self._prompts = PromptQueue(clock)
        self._answers: dict[str, tuple[AnswerWork, int, SloLoad]] = {}
        self._gaps: dict[SloClass, LongGaps] = {}
        self._pages = 0
        self._context = 0
        self._load: WorkerLoad | None = None
        self._load_at = float("-inf")
        self._refused_until_s: float | None = None
        self._settle()

    # What goes there and leaves again

    def book_prefill(self, request_id: str, work: PromptWork) -> None:
        """A prompt goes there."""
        self._prompts.book(request_id, work)
        self._settle_prompts()

    def prompt_taken(self, request_id: str) -> None:
        """The worker has it, and counts it from now on."""
        self._prompts.taken(request_id)

    def prompt_computed(self, request_id: str) -> None:
        """Its prompt is computed, its KV may still be on the way."""
        if self._prompts.computed(request_id):
            self._settle_prompts()

    def unbook_prefill(self, request_id: str) -> None:
        """This worker's prefill half is done with it."""
        if self._prompts.forget(request_id):
            self._settle_prompts()

    def book_decode(self, request_id: str, work: AnswerWork) -> None:
        """An answer of at most this size is going to be decoded there."""
        slo_load = self.slo_loads.get(work.slo)
        if slo_load is None:
            slo_load = self.slo_loads[work.slo] = SloLoad(work.slo, self.gaps(work.slo), self.idle_step_s)
            self._settle_tightest()
        slo_load.count += 1
        self._answers[request_id] = work, slo_load.gaps.add(work.spare), slo_load
        self._pages += work.pages
        self._context += work.context
        self._settle_answers()

    def unbook_decode(self, request_id: str) -> None:
        """Nothing of it is there any more."""
        known = self._answers.pop(request_id, None)
        if known is None:
            return
        work, level, slo_load = known
        slo_load.gaps.remove(level)
        slo_load.count -= 1
        self._pages -= work.pages
        self._context -= work.context
        if not slo_load.count:
            del self.slo_loads[work.slo]
            self._settle_tightest()
        self._load = None  # the last report still counts these pages
        self._settle_answers()

    def report(self, load: WorkerLoad) -> None:
        """The worker's own word, after a step."""
        self._load_at = self.clock()
        if load.cost != self.cost.parameters:
            self.cost = StepCost(load.cost)
        if self._prompts.tell(load.prefill_tokens) or load != self._load:
            self._load = load
            self._settle()

    def learn(self, cost: StepCost) -> None:
        """How long the worker's steps take, by what it has seen."""
        self.cost = cost
        self._settle()

    def change(self, info: WorkerInfo) -> None:
        """The worker registered again: other facts, the same process."""
        self.info = info
        self._settle()

    def expire(self) -> None:
        """Let go of a report that is too old. Called now and then."""
        if self.clock() - self._load_at >= LOAD_FRESH_S and (self._prompts.expire() or self._load is not None):
            self._load = None
            self._settle()

    def refuse(self) -> None:
        """It turned a request away: ask others first, for a moment."""
        self._refused_until_s = self.clock() + REFUSAL_PAUSE_S

    def note_prompt_steps(self, steps: int, longest_s: float) -> None:
        """So many steps there are going to take up to `longest_s` each, because of a prompt."""
        now = self.clock()
        for gaps in self._gaps.values():
            gaps.note(steps, longest_s, now)

    def note_gap(self, slo: SloClass, gap_s: float) -> None:
        """An answer of that class got a token from there, so long after the one before it."""
        if slo.has_gap_target and self.cost.parameters.observed:
            self.noise.note(slo, gap_s, self.step_s, self.decode_requests, self.clock())

    def gaps(self, slo: SloClass) -> LongGaps:
        """What its steps mean for answers of that class."""
        found = self._gaps.get(slo)
        if found is None:
            found = self._gaps[slo] = LongGaps(slo.bears(self.idle_step_s))
        return found

    def gap_target(self, slo: SloClass) -> float:
        """What answers of that class bear between tokens there, in seconds; infinite = anything, or nobody can say."""
        return slo.bears(self.idle_step_s) or math.inf

    def step_target(self, slo: SloClass) -> float:
        """How long steps may take there, as predicted, for that class; infinite = as long as they like."""
        return slo.step_target(self.idle_step_s, self.noise.of(slo)) or math.inf

    def long_per_s(self, slo: SloClass) -> float:
        """How many steps a second were too long for that class, of late."""
        gaps = self.gaps(slo)
        return gaps.per_s(self.clock()) if gaps.passed else 0.0

    @property
    def request_ids(self) -> set[str]:
        """Requests this worker is still needed for."""
        return {*self._prompts.request_ids, *self._answers}

    @property
    def idle(self) -> bool:
        """Whether nothing of this router is there."""
        return not (self._prompts.request_ids or self._answers or self._pages)

    # What placement asks

    @property
    def prompt_steps(self) -> PromptSteps:
        """How prompts go on there as things stand."""
        if self._prompt_steps is None:
            beside = Beside(self.decode_requests, self.decode_context, self.gap_targets)
            self._prompt_steps = PromptSteps(self.cost, self.info.duty, self.max_step_tokens, beside)
        return self._prompt_steps

    @property
    def queue(self) -> Run:
        """What computing the prompts takes that wait there."""
        if self._queue is None:
            waiting = self.prefill_tokens
            self._queue = self.prompt_steps.run(waiting, self.prefill_pairs) if waiting else NO_PROMPTS
        return self._queue

    @property
    def refusing(self) -> bool:
        """Whether it turned a request away a moment ago, or says that it is not ready."""
        until_s = self._refused_until_s
        if until_s is not None and self.clock() >= until_s:
            until_s = self._refused_until_s = None
        return not self._ready or until_s is not None

    def _settle(self) -> None:
        info = self.info
        self.role = info.role
        self._ready = not info.not_ready
        self.prefills, self.decodes = info.takes_prompts, info.takes_answers
        self.pages_total, self.page_tokens = info.pages_total, info.page_tokens
        self.kv_tokens_total = info.pages_total * info.page_tokens
        """Tokens that its pages hold."""
        self.answer_tokens_total = answer_tokens(info)
        """Those of them that answers may be promised; how many of these are left is the worker's to say."""
        self.max_step_tokens, self.max_batch_requests = info.max_step_tokens, info.max_batch_requests
        self.idle_step_s = self.cost.decode_step_seconds(1, 0)
        """A decode step of one request with little context."""
        for slo, gaps in self._gaps.items():
            gaps.target_s = slo.bears(self.idle_step_s)
        for slo, slo_load in self.slo_loads.items():
            slo_load.retarget(slo, self.idle_step_s)
        self._settle_tightest()
        self._settle_prompts()
        self._settle_answers()

    def _settle_tightest(self) -> None:
        self.gap_targets = tuple(sorted(slo_load.target_s for slo_load in self.slo_loads.values()))
        self.tightest_s = self.gap_targets[0] if self.gap_targets else math.inf

    def _settle_prompts(self) -> None:
        prompts = self._prompts
        self._queue = None
        self.prefill_idle = prompts.idle
        """Whether none of this router's prompts is being computed there."""
        self.prefill_tokens = waiting = prompts.tokens
        """Prompt tokens not yet computed."""
        if (waiting > 0) is not self.noise.prompts:
            self.noise.change(waiting > 0, self.clock())
        self.prefill_pairs = prompts.pairs(waiting)
        """Attention pairs of these."""
        if self.order is not None:
            self.order.rank_prompts(self)

    def _settle_answers(self) -> None:
        load, mine = self._load, len(self._answers)
        self._prompt_steps = self._queue = None
        self.decode_requests = rows = max(mine, load.decode_requests) if load else mine
        """Requests placed there for decoding."""
        self.pages_used = max(self._pages, load.pages_used) if load else self._pages
        """Pages promised or in use."""
        self.kv_tokens_free = (self.pages_total - self.pages_used) * self.page_tokens
        """Tokens that the others hold."""
        context = self._context * rows // mine if mine else self.pages_used * self.page_tokens if rows else 0
        self.decode_context = context
        """Tokens that a decode step there attends to; of others' requests nothing but their number is known."""
        self.step_s = self.cost.decode_step_seconds(rows, context)
        """A decode step there, in seconds."""
        if self.order is not None:
            self.order.rank_answers(self)
