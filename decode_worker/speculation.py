"""Speculative decoding: which requests have drafts in a step, and how many.

A proposer guesses the tokens that follow; the step verifies them (`drafts.py`). The number of drafts follows from the
predicted duration of the step and from the learned probability of acceptance: each draft is worth the probability that
it is accepted together with those before it, and drafts are added in the order of falling worth while the tokens per
second of the whole step rise (TurboSpec, arXiv 2406.14066). Where no drafts pay, steps are those of a batch without.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import numpy as np

from costs.acceptance import Acceptance
from costs.step_cost import StepCost
from costs.step_work import NOTHING, StepWork
from decode_worker.batch_snapshot import CompletedStep
from decode_worker.drafting_batch import DraftingBatch
from decode_worker.drafts import VerifiedStep
from decode_worker.request import DecodeRequest
from engine.speculation.proposer import Draft, Proposer
from engine.steps.batch import TokenRows

DRAFTS_MAX = 7
"""The most drafts of one request in a step."""
ROWS_MAX = 256
"""The most rows of a step with drafts: with more, products take so much longer that drafts hardly pay."""
GAIN_MIN = 1.03
"""The least predicted gain in tokens per second for which a step has drafts: predictions err by a few percent."""
PROBE_EVERY = 64
"""Where no drafts pay, one request has a draft in so many steps, so that a change of acceptance is noticed."""
_SPEEDUP_WEIGHT = 0.05
"""Weight of the newest step in the mean speed-up."""
_SPEEDUP_SEEN = 1.01
"""The least mean that counts as a speed-up."""


@dataclass(frozen=True, slots=True)
class StepBounds:
    """The bounds of a step with drafts, and the cost model that predicts its duration."""

    cost: StepCost
    seconds: float
    """The longest step that keeps the gap targets of all requests."""
    rows: int
    """The most rows, drafts included."""


@dataclass(slots=True)
class SpeculationCounts:
    """The counts of drafts since the worker started."""

    drafted: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Verified drafts, by the match that they rest on and their position in the draft from 0."""
    accepted: Counter[tuple[int, int]] = field(default_factory=Counter)
    """The accepted ones of them."""
    saved_s: float = 0.0
    """Predicted seconds that steps without drafts would have taken longer, for the mean tokens of a request."""
    lost_s: float = 0.0
    """Predicted seconds that steps without drafts would have been shorter, where too few drafts were accepted."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request with a draft, and what the draft is worth."""

    request: DecodeRequest
    draft: Draft
    survival: list[float]
    """The worth of each draft: the probability that it is accepted."""
    context: int | None
    """The tokens that the newest token's row attends to, itself included.

    None where attention reads the request's KV once, whatever its drafts.
    """

    def context_of(self, draft: int) -> int:
        """Return the tokens whose KV is read for the row of a draft, from 0, in addition to the rows before it."""
        return 0 if self.context is None else self.context + draft + 1

    def first(self, drafts: int) -> "Candidate":
        """Return the candidate with so many of its drafts."""
        if drafts >= len(self.survival):
            return self
        draft = Draft(self.draft.token_ids[:drafts], self.draft.match)
        return Candidate(self.request, draft, self.survival[:drafts], self.context)


class _Launched(NamedTuple):
    """What was known of a step when it was launched."""

    cost: StepCost
    work: StepWork
    """Its work without drafts."""
    drafted: Sequence[Candidate]

    def with_drafts(self) -> StepWork:
        """Return the work of the step."""
        return with_drafts(self.work, self.drafted)


class Speculation:
    """Proposes and judges drafts. Engine thread only; other threads may read the counts."""

    def __init__(self, proposer: Proposer, batch: DraftingBatch, grow: Callable[[DecodeRequest], bool]) -> None:
        """`grow` gives a request one more page, unless it would preempt another one for it."""
        self._proposer = proposer
        self._batch = batch
        self._grow = grow
        self._acceptance = Acceptance()
        self._told: dict[DecodeRequest, int] = {}
        """Requests that the proposer knows, each with the number of answer tokens that it was told."""
        self._steps_without = 0
        """Steps since the last one with drafts."""
        self.counts = SpeculationCounts()
        self.fixed_drafts: int | None = None
        """For measurements: the drafts of each request that has any, whether they pay or not; None = what pays."""
        self._speedup = 1.0
        self._launched = _Launched(StepCost(), NOTHING, ())
        """The newest step."""
        self._unlearned: list[tuple[CompletedStep, _Launched]] = []
        """Steps whose events were made, from which `learn` learns."""

    def read_kv_once(self) -> None:
        """Predict the steps of an engine whose attention reads a request's KV once, whatever its drafts."""
        self._batch.kv_read_once = True

    def waits(self, bounds: StepBounds | None) -> bool:
        """Return True if the next step cannot, or should not, be planned before the tokens of the last one are here.

        It should not if it will probably have drafts.
        """
        if not self._batch.in_flight_steps:
            return False
        if self._batch.verifies:
            return True
        if bounds is not None and self._choose(bounds, unknown=1):
            return True
        self._steps_without += 1
        return False

    def launch(self, bounds: StepBounds | None) -> TokenRows | None:
        """Launch the next step; within `bounds`, and with nothing in flight, it has drafts where they pay."""
        if bounds is None or self._batch.in_flight_steps:
            return self._batch.launch()
        chosen = self._choose(bounds, unknown=0)
        self._steps_without = 0 if chosen else self._steps_without + 1
        fitting = [each.first(self._positions(each)) for each in chosen]
        fitting = [each for each in fitting if each.survival]
        self._launched = _Launched(bounds.cost, self._batch.next_work(), fitting)
        return self._batch.launch({each.request: each.draft for each in fitting})

    def complete(self, step: CompletedStep) -> None:
        """Take a step whose events were made, for `learn`."""
        self._unlearned.append((step, self._launched))

    def learn(self) -> None:
        """Learn from the completed steps, while the next one runs: a step later, but the device does not wait for it.

        Drafts behind the end of an answer count neither way.
        """
        for step, launched in self._unlearned:
            self._learn(step, launched)
        self._unlearned.clear()

    def _learn(self, step: CompletedStep, launched: "_Launched") -> None:
        gained = 0
        for found in step.verified.values() if isinstance(step, VerifiedStep) else ():
            request = step.tokens(found.drafts.row)[0]
            match, accepted = found.drafts.match, len(found.token_ids) - 1
            drafted = accepted if request.ended else len(found.drafts.token_ids)
            self._acceptance.observe(match, drafted, accepted)
            self.counts.drafted.update((match, position) for position in range(drafted))
            self.counts.accepted.update((match, position) for position in range(accepted))
            gained += accepted
        speedup = 1.0
        if isinstance(step, VerifiedStep):
            row_tokens = 1.0 + gained / len(step.snapshot)
            plain_s, verify_s = launched.cost.seconds(launched.work), launched.cost.seconds(launched.with_drafts())
            saved_s = row_tokens * plain_s - verify_s
            self.counts.saved_s += max(saved_s, 0.0)
            self.counts.lost_s += max(-saved_s, 0.0)
            speedup = row_tokens * plain_s / verify_s
        self._speedup += _SPEEDUP_WEIGHT * (speedup - self._speedup)

    @property
    def speedup(self) -> float:
        """Tokens per second of recent steps ÷ those that steps without drafts would have given, by predictions.

        At least 1; 1 exactly where drafts are rare.
        """
        return self._speedup if self._speedup > _SPEEDUP_SEEN else 1.0

    def leave(self, request: DecodeRequest) -> None:
        """Forget a request that left the batch."""
        if self._told.pop(request, None) is not None:
            self._proposer.leave(request)

    def _choose(self, bounds: StepBounds, unknown: int) -> list[Candidate]:
        """Return the requests that have drafts in a step, each with as many as pay.

        `unknown` is the number of tokens of each request that have not arrived.
        """
        requests, work = self._batch.next_rows()
        eligible = [request for request in requests if self._may_draft(request, unknown)]
        if not eligible:
            return []
        if self.fixed_drafts is not None:
            candidates = [self._candidate(request, unknown).first(self.fixed_drafts) for request in eligible]
            return [each for each in candidates if each.survival]
        chosen: list[Candidate] = []
        if self._acceptance.best() > break_even(bounds.cost, work, kv_read_once=self._batch.kv_read_once):
            candidates = [self._candidate(request, unknown) for request in eligible]
            chosen = with_most_tokens(bounds, work, [each for each in candidates if each.survival])
        if not chosen and self._steps_without >= PROBE_EVERY:
            probed = self._candidate(eligible[self._steps_without % len(eligible)], unknown)
            chosen = [probed] if probed.survival else []
        return chosen

    def _may_draft(self, request: DecodeRequest, unknown: int) -> bool:
        sampling = request.reservation.sampling
        if request.leaving or request.history is not None or not sampling.speculate:
            return False
        return self._batch.rows_left(request) > 1 + unknown

    def _candidate(self, request: DecodeRequest, unknown: int) -> Candidate:
        """Return a request with the draft that follows its newest token, which is one of `unknown` that come first."""
        self._tell(request)
        most = min(DRAFTS_MAX, self._batch.rows_left(request) - 1)
        draft = self._proposer.propose(request, most + unknown)
        survival = self._acceptance.survival(draft.match, len(draft.token_ids))
        context = None if self._batch.kv_read_once else self._batch.next_position(request) + 1
        if unknown:
            draft, survival = Draft(draft.token_ids[unknown:], draft.match), survival[unknown:]
        return Candidate(request, draft, survival, context)

    def _tell(self, request: DecodeRequest) -> None:
        """Bring the proposer up to date."""
        answer, told = request.token_ids, self._told.get(request)
        if told is None:
            reservation = request.reservation
            self._proposer.begin(request, [*reservation.question, *answer], reservation.cache_salt)
        elif told < len(answer):
            self._proposer.extend(request, answer[told:])
        self._told[request] = len(answer)

    def _positions(self, candidate: Candidate) -> int:
        """Return the number of drafts for which the request has pages, or gets one that nobody else needs."""
        request = candidate.request
        left = self._batch.positions_left(request)
        if left < len(candidate.survival) and self._batch.grow_ahead(request, self._grow):
            left = self._batch.positions_left(request)
        return left


def break_even(cost: StepCost, work: StepWork, *, kv_read_once: bool = False) -> float:
    """Return the least probability of acceptance for which one draft more pays in a step with `work`.

    1 where nothing is known of the duration. `kv_read_once`: a draft's row reads no KV that another does not read.
    """
    seconds = cost.decode_step_seconds(work.decode_rows, work.decode_context_tokens)
    if not seconds:
        return 1.0
    context = 0 if kv_read_once else work.decode_context_tokens // work.decode_rows
    more = cost.decode_step_seconds(work.decode_rows + 1, work.decode_context_tokens + context)
    return work.decode_rows * (more - seconds) / seconds


def with_drafts(work: StepWork, candidates: Sequence[Candidate]) -> StepWork:
    """Return the work of a step with rows for all drafts of the candidates."""
    rows = sum(len(each.survival) for each in candidates)
    context = sum(each.context_of(draft) for each in candidates for draft in range(len(each.survival)))
    return StepWork(
        decode_rows=work.decode_rows + rows,
        decode_context_tokens=work.decode_context_tokens + context,
        draft_rows=rows,
    )


def with_most_tokens(bounds: StepBounds, work: StepWork, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates with so many of their drafts that the tokens per second of the step are most.

    Empty if the gain is less than GAIN_MIN.
    """
    if not candidates:
        return []
    counts = [len(each.survival) for each in candidates]
    worth = np.fromiter(chain.from_iterable(each.survival for each in candidates), np.float64, sum(counts))
    index = np.repeat(np.arange(len(counts)), counts)
    draft = np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)
    # The most worth first, and of equal worth the first draft of a request before the next one.
    order = np.lexsort((draft, -index, -worth))
    worth, index, draft = worth[order], index[order], draft[order]
    read = np.array([-1 if each.context is None else each.context for each in candidates])[index]
    read = np.where(read < 0, 0, read + draft + 1)
    rows, context = work.decode_rows, work.decode_context_tokens
    parameters = bounds.cost.parameters
    more_s = parameters.row_s * np.arange(1, len(worth) + 1) + parameters.context_s * np.cumsum(read)
    seconds = bounds.cost.decode_step_seconds(rows, context) + more_s
    plain = rows / bounds.cost.decode_step_seconds(rows, context)
    rates = (rows + np.cumsum(worth)) / seconds
    before = np.concatenate(([plain], rates[:-1]))
    refused = (rates <= before) | (seconds > bounds.seconds)
    most = max(0, min(bounds.rows, ROWS_MAX) - rows)
    added = min(most, int(refused.argmax()) if refused.any() else len(worth))
    if not added or rates[added - 1] < GAIN_MIN * plain:
        return []
    chosen = np.bincount(index[:added], minlength=len(counts)).tolist()
    return [each.first(count) for each, count in zip(candidates, chosen, strict=True) if count]
