"""Speculative decoding with proposers that compute: how many drafts pay, and whose context is stored for them.

Drafts of trained weights take time: a step for the first draft of all requests, one for the second, and so on. All
requests therefore have as many drafts, and their number is the one with the most tokens per second for the step and
those before it that propose, as the two fitted cost models predict. A draft model needs the KV of a request's context
first. It is stored where the time is predicted to come back before the answer ends, in pieces between the steps of the
batch; until then the request has no drafts.
"""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from decode_worker.batch_snapshot import DecodedStep
from decode_worker.draft_choice import GAIN_MIN, ROWS_MAX, Candidate, StepBounds
from decode_worker.drafting_batch import DraftingBatch
from decode_worker.request import DecodeRequest
from decode_worker.speculation import PROBE_EVERY, Speculation
from tandem.cost_model.acceptance import Acceptance
from tandem.cost_model.step_cost import StepCost
from tandem.cost_model.step_work import NOTHING, StepWork, chunk_pairs
from tandem.engine.grammar_masks import AllowedDrafts
from tandem.engine.speculation.proposer import DRAFTS_MAX, BatchProposer, Draft, Proposer, WantedDraft
from tandem.engine.steps.sampling_metadata import SamplingInput
from tandem.protocol.messages import SamplingParams

MISSING_MAX = DRAFTS_MAX + 1
"""The most tokens without KV that a draft begins with, each as a row of its own; of more, a piece is stored first."""


@dataclass(frozen=True, slots=True)
class DraftCount:
    """The drafts of each request in a step, and what is predicted of it."""

    drafts: int
    seconds: float
    """The seconds of the step and of the steps that propose."""
    saved_s: float
    """Seconds that the step saves for each token of a row."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """The work of the proposer before the next step."""

    drafts: dict[DecodeRequest, int] = field(default_factory=dict)
    pieces: dict[Hashable, int] = field(default_factory=dict)
    """Requests whose context is stored, each with its tokens in this step."""

    def __bool__(self) -> bool:
        return bool(self.drafts or self.pieces)


_NO_PLAN = _Plan()


class ModelSpeculation(Speculation):
    """Speculation by a proposer that computes drafts of all requests at once. Engine thread only, as `Speculation`."""

    refused_count_as_rejected = True

    def __init__(
        self,
        proposer: BatchProposer,
        batch: DraftingBatch,
        grow: Callable[[DecodeRequest], bool],
        allowed_drafts: AllowedDrafts,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """See `Speculation`; `clock` returns seconds."""
        super().__init__(proposer, batch, grow, allowed_drafts)
        self._model = proposer
        self._clock = clock
        self.counts.model_bytes = proposer.memory
        # Optimism finds out what an unknown draft model is worth: a few wrong drafts correct it
        # (docs/decisions/speculative_decoding.md).
        self._acceptance = Acceptance(prior=1.0)
        self._newest: DecodedStep | None = None
        """The newest step whose tokens are here."""
        self._probed: DecodeRequest | None = None
        """The request that will have a draft as a probe, while its context is stored."""

    def leave(self, request: DecodeRequest) -> None:
        """See `Speculation`."""
        super().leave(request)
        if request is self._probed:
            self._probed = None
        if not self._batch.requests:
            self._newest = None  # it would keep the last requests alive

    def complete(self, step: DecodedStep) -> None:
        """See `Speculation`."""
        super().complete(step)
        self._newest = step

    def _expects_drafts(self, bounds: StepBounds) -> bool:
        """See `Speculation`; also True if context will be stored, which needs the device as well."""
        return bool(self._plan(bounds, unknown=1))

    def _choose(self, bounds: StepBounds, unknown: int) -> list[Candidate]:
        """See `Speculation`; stores context and computes the drafts."""
        plan = self._plan(bounds, unknown)
        if not plan:
            return []
        wanted = {each: min(drafts, self._positions(each, drafts)) for each, drafts in plan.drafts.items()}
        wanted = {each: drafts for each, drafts in wanted.items() if drafts}
        began = self._clock()
        if plan.pieces:
            self._model.store_context(plan.pieces)
        found = self._model.compute(self._wanted(wanted)) if wanted else ()
        self.drafting_s = self._clock() - began
        if self._probed in wanted:
            self._probed = None
        drafts = [
            self._allowed(each, Draft(tokens, self._model.source)) for each, tokens in zip(wanted, found, strict=True)
        ]
        return [
            Candidate(each, draft, self._survival(len(draft.token_ids)), self._context(each))
            for each, draft in zip(wanted, drafts, strict=True)
            if draft.token_ids
        ]

    def _wanted(self, drafts: Mapping[DecodeRequest, int]) -> list[WantedDraft]:
        drew: dict[DecodeRequest, Sequence[int]] = {}
        if (step := self._newest) is not None:
            drew = {slot.request: step.rows_of(row) for row, slot in enumerate(step.snapshot.slots)}
        return [WantedDraft(each, self._draws(each, count), drew.get(each, ())) for each, count in drafts.items()]

    def _survival(self, drafts: int) -> list[float]:
        return self._acceptance.survival(self._model.source, min(drafts, self._model.longest))

    def _plan(self, bounds: StepBounds, unknown: int) -> _Plan:
        eligible, work = self._eligible(unknown)
        if not eligible:
            return _NO_PLAN
        every = self._count(bounds, work, eligible)
        if not every.drafts:
            return self._probe(bounds, work, eligible)
        for request in eligible:
            self._update_proposer(request)
        ready, rows = [], 0
        for each in eligible:
            missing = self._model.missing(each)
            if missing <= MISSING_MAX and rows + missing <= self._model.max_step_tokens:
                ready.append(each)
                rows += missing
        now = every if len(ready) == len(eligible) else self._count(bounds, work, ready)
        drafts = {each: self._room(each, now.drafts) for each in ready} if now.drafts else {}
        waiting = [each for each in eligible if self._model.missing(each) > MISSING_MAX]
        return _Plan(
            {each: count for each, count in drafts.items() if count},
            self._pieces(bounds, work, waiting, now.seconds, every.saved_s / len(eligible)),
        )

    def _count(self, bounds: StepBounds, work: StepWork, requests: Sequence[DecodeRequest]) -> DraftCount:
        """Return the number of drafts of each of these requests with which a step has the most tokens per second."""
        context = sum(self._batch.next_position(each) + 1 for each in requests)
        survival = self._survival(DRAFTS_MAX)
        costs = DraftCosts(bounds.cost, self._model.cost, work, len(requests), context)
        if self.fixed_drafts is not None:
            return costs.count(survival[: self.fixed_drafts], kv_read_once=self._batch.kv_read_once)
        most = max(0, min(bounds.rows, ROWS_MAX) - work.decode_rows) // max(1, len(requests))
        counts = [
            costs.count(survival[:drafts], kv_read_once=self._batch.kv_read_once)
            for drafts in range(min(len(survival), most) + 1)
        ]
        plain = counts[0]
        fitting = [each for each in counts if each.seconds <= bounds.seconds and each.drafts]
        best = max(fitting, key=lambda each: each.saved_s, default=plain)
        return best if best.saved_s > (1 - 1 / GAIN_MIN) * plain.seconds else plain

    def _probe(self, bounds: StepBounds, work: StepWork, eligible: Sequence[DecodeRequest]) -> _Plan:
        """Return the plan of one draft, where none pays: of a request that has little to store.

        All of a probe may take one part in PROBE_EVERY of the time since the last draft.
        """
        if self.fixed_drafts is not None or self._steps_without < PROBE_EVERY:
            return _NO_PLAN
        plain_s = bounds.cost.seconds(work)
        request = self._probed
        if request is None or request not in eligible:
            request = min(eligible, key=self._missing)
            missing, context = self._missing(request), self._batch.next_position(request) + 1
            costs = DraftCosts(bounds.cost, self._model.cost, work, 1, context)
            spent_s = costs.count([0.0], kv_read_once=self._batch.kv_read_once).seconds - plain_s
            if missing > MISSING_MAX:
                spent_s += _store_seconds(self._model.cost, missing, context, missing)[0]
            if spent_s * PROBE_EVERY > self._steps_without * plain_s:
                return _NO_PLAN
            self._probed = request
        self._update_proposer(request)
        if self._model.missing(request) > MISSING_MAX:
            return _Plan(pieces=self._pieces(bounds, work, [request], plain_s, None))
        drafts = self._room(request, 1)
        return _Plan({request: drafts}) if drafts else _NO_PLAN

    def _pieces(
        self,
        bounds: StepBounds,
        work: StepWork,
        waiting: Sequence[DecodeRequest],
        step_s: float,
        saved_s: float | None,
    ) -> dict[Hashable, int]:
        """Return the tokens of context to store for requests before a step of `step_s`, the fewest missing first.

        Beyond its fixed cost, the storing takes at most as long as a step without drafts, within the gap targets.
        `saved_s`: seconds that drafts of a request save for each of its tokens; where they do not make up for the
        storing before the answer ends, nothing is stored. None = stored in any case.
        """
        cost = self._model.cost
        fixed_s = cost.parameters.base_s + cost.parameters.prompt_base_s
        limit_s = min(bounds.cost.seconds(work) + fixed_s, bounds.seconds - step_s)
        pieces: dict[Hashable, int] = {}
        stored = NOTHING
        for request in sorted(waiting, key=self._model.missing):
            missing, end = self._model.missing(request), self._batch.next_position(request)
            left_s = limit_s - (cost.seconds(stored) - fixed_s if pieces else 0.0)
            tokens = min(missing - 1, self._model.max_step_tokens - stored.prefill_tokens, self._chunk(left_s, end))
            if tokens < 1:
                break
            if saved_s is not None and self.fixed_drafts is None:
                seconds, steps = _store_seconds(cost, missing, end, tokens)
                if (self._rest(request) - steps) * saved_s <= seconds:
                    continue
            if self._model.room(request, 1):
                pieces[request] = tokens
                stored = stored.with_chunk(tokens, end + 1 - missing)
        return pieces

    def _chunk(self, seconds: float, context: int) -> int:
        """Return the most tokens behind `context` others whose KV is stored in so many seconds."""
        return self._model.cost.tokens_within(seconds, 0, 0, context)

    def _missing(self, request: DecodeRequest) -> int:
        """Return the tokens of a request, which the proposer may not know yet, whose KV is not stored."""
        if request in self._known_tokens:
            return self._model.missing(request)
        return self._model.missing_at_first(self._batch.next_position(request) + 1)

    def _room(self, request: DecodeRequest, drafts: int) -> int:
        return self._model.room(request, min(drafts, self._batch.rows_left(request) - 1))

    def _rest(self, request: DecodeRequest) -> int:
        """Return the tokens that the answer is expected to gain, by the pages that were promised for it."""
        expected = self._batch.kv.tokens_in(request.committed, decoding=True) - self._batch.next_position(request)
        return min(expected, self._batch.rows_left(request))

    @staticmethod
    def _draws(request: DecodeRequest, drafts: int) -> list[SamplingInput]:
        """Return the draws of the tokens behind the newest one, without biases and limits of the answer's beginning.

        All of a grammar have the history of the answer so far.
        """
        sampling = request.reservation.sampling
        first = request.first_draw + len(request.token_ids) - 1
        drawn = SamplingParams(
            1,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=sampling.seed,
            grammar=sampling.grammar,
        )
        return [SamplingInput(drawn, first + draft, request.history) for draft in range(drafts)]


@dataclass(frozen=True, slots=True)
class DraftCosts:
    """The predicted seconds of a step in which some requests have drafts, and of the steps that propose them."""

    verify: StepCost
    propose: StepCost
    work: StepWork
    """The step's work without drafts."""
    requests: int
    """The number of requests with drafts."""
    context: int
    """The tokens that their rows attend to, summed."""

    def count(self, survival: Sequence[float], *, kv_read_once: bool) -> DraftCount:
        """Return what is predicted of as many drafts for each request as `survival` has.

        `survival` is the probability, for each draft, that it is accepted with those before it.
        """
        drafts, rows, work = len(survival), self.requests, self.work
        more = 0 if kv_read_once else sum(self.context + rows * (draft + 1) for draft in range(drafts))
        seconds = self.verify.seconds(work.with_drafts(rows * drafts, more))
        if drafts:
            # If all drafts before were accepted, the last of them was not fed yet: one row more.
            fed = rows * survival[-1]
            first_s = self.propose.rows_seconds(rows, self.context) + fed * self.propose.parameters.row_s
            others = (self.propose.rows_seconds(rows, self.context + rows * draft) for draft in range(1, drafts))
            seconds += first_s + sum(others)
        tokens = 1.0 + rows * sum(survival) / work.decode_rows
        plain_s = self.verify.seconds(work)
        return DraftCount(drafts, seconds, plain_s - seconds / tokens)


def _store_seconds(cost: StepCost, missing: int, end: int, chunk: int) -> tuple[float, int]:
    """Return the seconds and steps that store the KV of `missing` tokens up to position `end` in such chunks."""
    return cost.prefill_seconds(missing, chunk_pairs(missing, max(0, end + 1 - missing)), chunk)


def speculation_of(
    proposer: Proposer,
    batch: DraftingBatch,
    grow: Callable[[DecodeRequest], bool],
    allowed_drafts: AllowedDrafts,
) -> Speculation:
    """Return the speculation by this proposer; see `Speculation`."""
    if isinstance(proposer, BatchProposer):
        return ModelSpeculation(proposer, batch, grow, allowed_drafts)
    return Speculation(proposer, batch, grow, allowed_drafts)
