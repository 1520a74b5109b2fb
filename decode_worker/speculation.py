"""Speculative decoding: which requests have drafts in a step, and how many.

A proposer guesses the tokens that follow; the step verifies them (`drafts.py`). The number of drafts follows from the
predicted duration of the step and from the learned probability of acceptance: each draft is worth the probability that
it is accepted together with those before it, and drafts are added in the order of falling worth while the tokens per
second of the whole step rise (TurboSpec, arXiv 2406.14066). Where no drafts pay, steps are those of a batch without.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from costs.acceptance import Acceptance
from costs.step_cost import StepCost
from costs.step_work import StepWork
from decode_worker.batch_snapshot import CompletedStep
from decode_worker.request import DecodeRequest
from decode_worker.running_batch import RunningBatch
from engine.speculation.proposer import Draft, Proposer

DRAFTS_MAX = 7
"""The most drafts of one request in a step."""
GAIN_MIN = 1.03
"""The least predicted gain in tokens per second for which a step has drafts: predictions err by a few percent."""
PROBE_EVERY = 64
"""Where no drafts pay, one request has a draft in so many steps, so that a change of acceptance is noticed."""
TOKENS_PER_ROW_WEIGHT = 0.05
"""Weight of the newest step in the mean tokens of a row."""


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

    drafted: Counter[int] = field(default_factory=Counter)
    """Verified drafts, by their position in the draft from 0."""
    accepted: Counter[int] = field(default_factory=Counter)
    """The accepted ones of them."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    request: DecodeRequest
    draft: Draft
    survival: list[float]
    """The worth of each draft: the probability that it is accepted."""
    context: int
    """The tokens that the newest token's row attends to, itself included."""

    def first(self, drafts: int) -> "_Candidate":
        """Return the candidate with so many of its drafts."""
        draft = Draft(self.draft.token_ids[:drafts], self.draft.match)
        return _Candidate(self.request, draft, self.survival[:drafts], self.context)


class Speculation:
    """Proposes and judges drafts. Engine thread only; other threads may read the counts."""

    def __init__(self, proposer: Proposer, batch: RunningBatch, grow: Callable[[DecodeRequest], bool]) -> None:
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
        self.tokens_per_row = 1.0
        """Mean tokens that a request gained in a step, lately."""

    def drafts(self, bounds: StepBounds) -> dict[DecodeRequest, Draft]:
        """Return the drafts of the next step, for which nothing is in flight."""
        chosen = self._choose(bounds, unknown=0)
        if not chosen:
            self._steps_without += 1
            return {}
        fitting = {each.request: self._fit_pages(each.request, each.draft) for each in chosen}
        self._steps_without = 0
        return {request: draft for request, draft in fitting.items() if draft.token_ids}

    def pays_to_wait(self, bounds: StepBounds) -> bool:
        """Return True if the next step will probably have drafts once the tokens of the step in flight are here."""
        if self._choose(bounds, unknown=1):
            return True
        self._steps_without += 1
        return False

    def complete(self, step: CompletedStep) -> None:
        """Learn from a step whose events were made: drafts behind the end of an answer count neither way."""
        gained = 0
        for each in () if step.drafts is None else step.drafts.drafts:
            request, _, tokens = step.tokens(each.row)
            if request.cancelled:
                continue
            accepted = len(tokens) - 1
            drafted = accepted if request.ended else len(each.token_ids)
            self._acceptance.observe(each.match, drafted, accepted)
            self.counts.drafted.update(range(drafted))
            self.counts.accepted.update(range(accepted))
            gained += accepted
        rows = len(step.snapshot)
        self.tokens_per_row += TOKENS_PER_ROW_WEIGHT * ((rows + gained) / rows - self.tokens_per_row)

    def leave(self, request: DecodeRequest) -> None:
        """Forget a request that left the batch."""
        if self._told.pop(request, None) is not None:
            self._proposer.leave(request)

    def _choose(self, bounds: StepBounds, unknown: int) -> list[_Candidate]:
        """Return the requests that have drafts in a step, each with as many as pay.

        `unknown` is the number of tokens of each request that have not arrived.
        """
        requests, work = self._batch.next_rows()
        eligible = [request for request in requests if self._may_draft(request, unknown)]
        if not eligible:
            return []
        chosen: list[_Candidate] = []
        if self._acceptance.best() > break_even(bounds.cost, work):
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

    def _candidate(self, request: DecodeRequest, unknown: int) -> _Candidate:
        """Return a request with the draft that follows its newest token, which is one of `unknown` that come first."""
        self._tell(request)
        most = min(DRAFTS_MAX, self._batch.rows_left(request) - 1)
        draft = self._proposer.propose(request, most + unknown)
        survival = self._acceptance.survival(draft.match, len(draft.token_ids))
        position = self._batch.next_position(request)
        return _Candidate(request, Draft(draft.token_ids[unknown:], draft.match), survival[unknown:], position + 1)

    def _tell(self, request: DecodeRequest) -> None:
        """Bring the proposer up to date."""
        answer, told = request.token_ids, self._told.get(request)
        if told is None:
            reservation = request.reservation
            self._proposer.begin(request, [*reservation.question, *answer], reservation.cache_salt)
        elif told < len(answer):
            self._proposer.extend(request, answer[told:])
        self._told[request] = len(answer)

    def _fit_pages(self, request: DecodeRequest, draft: Draft) -> Draft:
        """Return the part of a draft for which the request has pages, or gets one that nobody else needs."""
        room = self._batch.positions_left(request)
        if room < len(draft.token_ids) and self._batch.grow_ahead(request, self._grow):
            room = self._batch.positions_left(request)
        return Draft(draft.token_ids[:room], draft.match)


def break_even(cost: StepCost, work: StepWork) -> float:
    """Return the least probability of acceptance for which one draft more pays in a step with `work`.

    1 where nothing is known of the duration.
    """
    seconds = cost.decode_step_seconds(work.decode_rows, work.decode_context_tokens)
    if not seconds:
        return 1.0
    context = work.decode_context_tokens // work.decode_rows
    more = cost.decode_step_seconds(work.decode_rows + 1, work.decode_context_tokens + context)
    return work.decode_rows * (more - seconds) / seconds


def with_most_tokens(bounds: StepBounds, work: StepWork, candidates: Sequence[_Candidate]) -> list[_Candidate]:
    """Return the candidates with so many of their drafts that the tokens per second of the step are most.

    Empty if the gain is less than GAIN_MIN.
    """
    rows, context, tokens = work.decode_rows, work.decode_context_tokens, float(work.decode_rows)
    seconds = bounds.cost.decode_step_seconds(rows, context)
    plain = best = tokens / seconds
    counts: Counter[int] = Counter()
    ranked = sorted(((worth, index) for index, each in enumerate(candidates) for worth in each.survival), reverse=True)
    for worth, index in ranked:
        rows, context, tokens = rows + 1, context + candidates[index].context + counts[index] + 1, tokens + worth
        seconds = bounds.cost.decode_step_seconds(rows, context)
        if tokens / seconds <= best or seconds > bounds.seconds or rows > bounds.rows:
            break
        best = tokens / seconds
        counts[index] += 1
    if best < GAIN_MIN * plain:
        return []
    return [candidates[index].first(count) for index, count in counts.items()]
