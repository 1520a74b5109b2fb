"""The state of one worker as this router knows it: requests in flight, load reports, learned costs, gap targets."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

from costs.chunks import NO_LIMIT, ConcurrentDecode, StepLimit, breaks_target, step_limit
from costs.step_cost import LearnedMargin, StepCost
from costs.step_work import chunk_pairs
from router.slo import SloClass
from wire.ending import answer_tokens
from wire.messages import WorkerInfo, WorkerLoad
from wire.tracing.timeline import TransferStats

LOAD_FRESH_S = 1.0
"""The age at which a load report no longer counts: a worker without work sends none."""
REFUSAL_PAUSE_S = 0.05
"""The time for which a worker that refused a request is not asked again while others can serve."""

Clock = Callable[[], float]
"""A clock of seconds: `time.monotonic` or a virtual one."""


class PromptWork(NamedTuple):
    """A prompt to compute: `tokens` behind `cached` ones."""

    tokens: int
    cached: int = 0

    @property
    def pairs(self) -> float:
        """The attention pairs."""
        return chunk_pairs(self.tokens, self.cached)


class AnswerWork(NamedTuple):
    """An answer to decode: at most `pages`, and about `context` tokens to attend to."""

    pages: int
    context: int
    slo: SloClass


_COMPUTED = PromptWork(0)


class LoadObserver(Protocol):
    """Keeps workers in the order of their load."""

    def prompts_changed(self, worker: WorkerState) -> None:
        """Called when the prompts that wait there have changed."""

    def answers_changed(self, worker: WorkerState) -> None:
        """Called when the requests that decode there have changed."""


class WorkerState:
    """One run of one worker.

    Counts are the larger of this router's own requests and the worker's load report, which includes other routers'.
    Placement reads plain attributes, which are computed when something changes: reads are far more frequent.
    """

    def __init__(self, info: WorkerInfo, clock: Clock) -> None:
        self.peer = info.peer
        self._set_facts(info)
        self.slot = -1
        """Its number in the fleet, -1 outside of it."""
        self.live = False
        """True if it is connected and takes new work."""
        self.observer: LoadObserver | None = None
        self.cost = StepCost()
        self.page_transfer_s = 0.0
        """The mean time in which a KV page comes here from another worker, in seconds; 0 before the first transfer."""
        self._transfer_s, self._pages_received = 0.0, 0
        self.gap_targets: tuple[float, ...] = ()
        """The longest gaps that the answers there tolerate, one per class, in seconds, sorted."""
        self.clock = clock
        self._prompts: dict[str, PromptWork] = {}
        self._own_tokens, self._own_pairs = 0, 0.0
        """The tokens and pairs of these prompts that are not computed yet."""
        self._reported_tokens: int | None = None
        self._unreported: dict[str, bool] = {}
        """Prompts that the last load report did not include: True if the worker has accepted the prompt since then."""
        self.prefill_tokens = 0
        """Prompt tokens that wait there."""
        self._answers: dict[str, AnswerWork] = {}
        self._classes: dict[SloClass, int] = {}
        """The number of answers by class."""
        self._pages = self._context = 0
        self._load: WorkerLoad | None = None
        self._load_at = -math.inf
        self.backlog: tuple[float, int] | None = None
        """Seconds and steps that the waiting prompts take; None = `latency_model` computes it when needed."""
        self._refused_until_s = -math.inf
        self._step_limit: StepLimit | None = None
        self._margin: LearnedMargin | None = None
        self._last_prompt_s = -math.inf
        self._refresh()

    # ---- requests in flight ----

    def add_prompt(self, request_id: str, work: PromptWork) -> None:
        """Count a prompt that is sent there."""
        self._settle(self._prompts.get(request_id, _COMPUTED))
        self._prompts[request_id] = work
        self._unreported[request_id] = False
        self._own_tokens += work.tokens
        self._own_pairs += work.pairs
        self._refresh_prompts()

    def prompt_accepted(self, request_id: str) -> None:
        """Note that the next load report includes the prompt."""
        if request_id in self._unreported:
            self._unreported[request_id] = True

    def prompt_computed(self, request_id: str) -> None:
        """Note that nothing of the prompt is left to compute; its KV may still be in transfer."""
        work = self._prompts.get(request_id, _COMPUTED)
        if work.tokens:
            self._prompts[request_id] = _COMPUTED
            self._unreported.pop(request_id, None)
            self._settle(work)
            self._refresh_prompts()

    def remove_prompt(self, request_id: str) -> None:
        """Remove a prompt with which the worker's prefill half is done."""
        work = self._prompts.pop(request_id, _COMPUTED)
        self._unreported.pop(request_id, None)
        self._settle(work)
        if work.tokens:
            if not self._own_tokens:
                self._reported_tokens = None  # the worker may be idle now, and then sends no further report
            self._refresh_prompts()

    def add_answer(self, request_id: str, work: AnswerWork) -> None:
        """Count an answer that is going to be decoded there."""
        self._answers[request_id] = work
        count = self._classes.get(work.slo, 0)
        self._classes[work.slo] = count + 1
        if not count:
            self._refresh_targets()
        self._pages += work.pages
        self._context += work.context
        self._refresh_answers()

    def remove_answer(self, request_id: str) -> None:
        """Remove an answer of which nothing is left there."""
        work = self._answers.pop(request_id, None)
        if work is None:
            return
        self._classes[work.slo] -= 1
        if not self._classes[work.slo]:
            del self._classes[work.slo]
            self._refresh_targets()
        self._pages -= work.pages
        self._context -= work.context
        self._load = None  # the last report still counts these pages
        self._refresh_answers()

    @property
    def request_ids(self) -> set[str]:
        """The requests that this worker is still needed for."""
        return {*self._prompts, *self._answers}

    @property
    def idle(self) -> bool:
        """True if no request of this router is there."""
        return not (self._prompts or self._answers or self._pages)

    # ---- what the worker reports ----

    def report(self, load: WorkerLoad) -> None:
        """Take a load report, which the worker sends after a step."""
        self._load_at = self.clock()
        if load.cost != self.cost.parameters:
            self.cost = StepCost(load.cost)
        included = [each for each, accepted in self._unreported.items() if accepted]
        for each in included:
            del self._unreported[each]
        if included or load != self._load or load.prefill_tokens != self._reported_tokens:
            self._load, self._reported_tokens = load, load.prefill_tokens
            self._refresh()

    def learn_cost(self, cost: StepCost) -> None:
        """Set the cost of the worker's steps."""
        self.cost = cost
        self._refresh()

    def learn_transfer(self, transfer: TransferStats) -> None:
        """Learn from a transfer to this worker that has ended; one of no pages is ignored."""
        if transfer.pages:
            self._transfer_s += transfer.duration_nanos / 1e9
            self._pages_received += transfer.pages
            self.page_transfer_s = self._transfer_s / self._pages_received

    def update(self, info: WorkerInfo) -> None:
        """Take the facts with which the same process registered again."""
        self._set_facts(info)
        self._refresh()

    def expire_report(self) -> None:
        """Drop a load report that is too old. Called periodically."""
        known = self._load is not None or self._reported_tokens is not None
        if known and self.clock() - self._load_at >= LOAD_FRESH_S:
            self._load = self._reported_tokens = None
            self._refresh()

    def pause(self) -> None:
        """Note that it refused a request."""
        self._refused_until_s = self.clock() + REFUSAL_PAUSE_S

    @property
    def refusing(self) -> bool:
        """True if it refused a request within `REFUSAL_PAUSE_S` or reports that it is not ready."""
        return not self._ready or (self._refused_until_s > 0.0 and self.clock() < self._refused_until_s)

    # ---- targets ----

    @property
    def margin(self) -> float:
        """Gap at the client ÷ predicted decode step, 99.5th percentile; the worker's own margin before any gap came."""
        return self.cost.margin if self._margin is None else self._margin.value

    def observe_gap(self, gap_s: float) -> None:
        """Learn the margin from a gap of one of the answers there, unless prompts waited during it."""
        quiet = not self.prefill_tokens and self.clock() - gap_s >= self._last_prompt_s
        if quiet and self.step_s > 0.0 and self.cost.parameters.observed:
            self._margin = self._margin or LearnedMargin(self.cost.margin)
            self._margin.observe(gap_s / self.step_s, 1.0 / self.decode_requests)

    def gap_target(self, slo: SloClass) -> float:
        """Return the longest gap that `slo` tolerates there, in seconds; infinite = any, or not known yet."""
        return slo.tolerates(self.idle_step_s) or math.inf

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
            self._step_limit = step_limit(self.cost, self.info.assignment, decode) if self.decode_requests else NO_LIMIT
        return self._step_limit

    # ---- derived attributes ----

    def _settle(self, work: PromptWork) -> None:
        self._own_tokens -= work.tokens
        self._own_pairs = self._own_pairs - work.pairs if self._own_tokens else 0.0

    def _set_facts(self, info: WorkerInfo) -> None:
        self.info = info
        self._ready = not info.not_ready
        self.prefills, self.decodes = info.takes_prompts, info.takes_answers
        self.pages_total, self.page_tokens = info.pages_total, info.page_tokens
        self.kv = info.kv_pages
        """The KV pages of its requests."""
        self.kv_tokens_total = self.kv.tokens_in(info.pages_total)
        """Tokens that its pages hold."""
        self.answer_tokens_total = answer_tokens(info)
        """Tokens of these that answers may reserve."""
        self.max_step_tokens, self.max_batch_requests = info.max_step_tokens, info.max_batch_requests

    def _refresh(self) -> None:
        self.idle_step_s = self.cost.decode_step_seconds(1, 0)
        """A decode step of one request with little context."""
        self._refresh_targets()
        self._refresh_prompts()
        self._refresh_answers()

    def _refresh_targets(self) -> None:
        self.gap_targets = tuple(sorted(self.gap_target(slo) for slo in self._classes))

    def _refresh_prompts(self) -> None:
        own, reported = self._own_tokens, self._reported_tokens
        self.backlog = None
        self.prefill_idle = own == 0
        """True if none of this router's prompts is computed there."""
        waiting = own if reported is None else reported + sum(self._prompts[each].tokens for each in self._unreported)
        if self.prefill_tokens and not waiting:
            self._last_prompt_s = self.clock()
        self.prefill_tokens = waiting
        if not own:
            self.prefill_pairs = chunk_pairs(waiting, 0)
        elif waiting >= own:
            self.prefill_pairs = self._own_pairs * waiting / own
        else:  # the last tokens of a prompt attend to the most
            self.prefill_pairs = self._own_pairs * (1 - (1 - waiting / own) ** 2)
        if self.observer is not None:
            self.observer.prompts_changed(self)

    def _refresh_answers(self) -> None:
        load, own = self._load, len(self._answers)
        self._step_limit = self.backlog = None
        self.decode_requests = rows = max(own, load.decode_requests) if load else own
        self.pages_used = max(self._pages, load.pages_used) if load else self._pages
        """Pages reserved or in use."""
        self.kv_tokens_free = self.kv.tokens_in(max(0, self.pages_total - self.pages_used), decoding=not self.prefills)
        # The contexts of other routers' requests are not known: as long as the own ones', else as their pages.
        context = (
            self._context * rows // own if own else self.pages_used * self.page_tokens // self.kv.groups if rows else 0
        )
        self.decode_context = context
        """Tokens that a decode step there attends to."""
        self.step_s = self.cost.decode_step_seconds(rows, context)
        """A decode step there, in seconds."""
        if self.observer is not None:
            self.observer.answers_changed(self)
