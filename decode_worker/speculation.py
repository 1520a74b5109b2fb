"""Speculative decoding: which requests have drafts in a step, and how many.

A proposer guesses the tokens that follow; the step verifies them (`drafts.py`). The number of drafts follows from the
predicted duration of the step and from the learned probability of acceptance: each draft is worth the probability that
it is accepted together with those before it, and those of the most worth are verified, as many as give the most tokens
per second of the whole step (TurboSpec, arXiv 2406.14066). Where no drafts pay, steps are those of a batch without.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from decode_worker.batch_snapshot import DecodedStep
from decode_worker.draft_choice import Candidate, StepBounds, break_even, with_drafts, with_most_tokens
from decode_worker.drafting_batch import DraftingBatch
from decode_worker.drafts import VerifiedStep
from decode_worker.request import DecodeRequest
from tandem.cost_model.acceptance import Acceptance
from tandem.cost_model.step_cost import StepCost
from tandem.cost_model.step_work import NOTHING, StepWork
from tandem.engine.grammar_masks import AllowedDrafts
from tandem.engine.speculation.proposer import DRAFTS_MAX, Draft, DraftSource, Proposer
from tandem.engine.steps.batch import TokenRows

PROBE_EVERY = 64
"""Where no drafts pay, one request has a draft in so many steps, so that a change of acceptance is noticed."""
_SPEEDUP_WEIGHT = 0.05
"""Weight of the newest step in the mean speed-up."""
_SPEEDUP_SEEN = 1.01
"""The least mean that counts as a speed-up."""


@dataclass(slots=True)
class SpeculationCounts:
    """The counts of drafts since the worker started."""

    drafted: Counter[tuple[DraftSource, int]] = field(default_factory=Counter)
    """Verified drafts, by their source and their position in the draft from 0."""
    accepted: Counter[tuple[DraftSource, int]] = field(default_factory=Counter)
    """The accepted ones of them."""
    saved_s: float = 0.0
    """Predicted seconds that steps without drafts would have taken longer, for the mean tokens of a request."""
    drafting_s: float = 0.0
    """Seconds that a draft model, or heads, took to propose."""
    model_bytes: Mapping[str, int] = field(default_factory=dict)
    """The memory of the `weights` and the `kv` pages that propose drafts; empty without such."""
    lost_s: float = 0.0
    """Predicted seconds that steps without drafts would have been shorter, where too few drafts were accepted."""


class _Launched(NamedTuple):
    """The facts about a step that were known when it was launched."""

    cost: StepCost
    work: StepWork
    """Its work without drafts."""
    drafted: Sequence[Candidate]
    computing_s: float
    """The seconds that computing its drafts took."""
    refused: frozenset[DecodeRequest] = frozenset()
    """The requests whose drafts end where the grammar refused the next one."""

    def seconds(self) -> tuple[float, float]:
        """Return the predicted seconds of the step without drafts, and with them."""
        cost = self.cost
        return cost.seconds(self.work), cost.seconds(with_drafts(self.work, self.drafted)) + self.computing_s


_NOT_LAUNCHED = _Launched(StepCost(), NOTHING, (), 0.0)


class Speculation:
    """Proposes and judges drafts. Engine thread only; other threads may read the counts."""

    refused_count_as_rejected = False
    """True if drafts that a grammar refuses were paid for, and therefore count as rejected ones."""

    def __init__(
        self,
        proposer: Proposer,
        batch: DraftingBatch,
        grow: Callable[[DecodeRequest], bool],
        allowed_drafts: AllowedDrafts,
    ) -> None:
        """`grow` gives a request one more page, unless it would preempt another one for it.

        `allowed_drafts` returns how many of a request's first drafts its grammar allows.
        """
        self._proposer = proposer
        self._batch = batch
        self._grow = grow
        self._allowed_drafts = allowed_drafts
        self._refused: dict[DecodeRequest, int] = {}
        """Requests of whose drafts the grammar refused one, each with the number of drafts before it."""
        self._acceptance = Acceptance()
        self._known_tokens: dict[DecodeRequest, int] = {}
        """The requests that the proposer has state of, each with the number of answer tokens that it was given."""
        self._steps_without = 0
        """Steps since the last one with drafts."""
        self.drafting_s = 0.0
        """The seconds that proposing took before the newest step was launched."""
        self.counts = SpeculationCounts()
        self.fixed_drafts: int | None = None
        """For measurements: the drafts of each request that has any, whether they pay or not; None = what pays."""
        self._speedup = 1.0
        self._launched = _NOT_LAUNCHED
        """The newest step with bounds, until its tokens are here."""
        self._unlearned: list[tuple[DecodedStep, _Launched]] = []
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
        if bounds is not None and self._expects_drafts(bounds):
            return True
        self._steps_without += 1
        return False

    def launch(self, bounds: StepBounds | None) -> TokenRows | None:
        """Launch the next step; within `bounds`, and with nothing in flight, it has drafts where they pay."""
        self.drafting_s = 0.0
        self._refused.clear()
        if bounds is None or self._batch.in_flight_steps:
            return self._batch.launch()
        chosen = self._choose(bounds, unknown=0)
        self._steps_without = 0 if chosen else self._steps_without + 1
        fitting = [each.first(self._positions(each.request, len(each.survival))) for each in chosen]
        fitting = [each for each in fitting if each.survival]
        refused = frozenset(e.request for e in fitting if len(e.survival) == self._refused.get(e.request))
        self._launched = _Launched(bounds.cost, self._batch.next_rows()[1], fitting, self.drafting_s, refused)
        self.counts.drafting_s += self.drafting_s
        if not fitting:
            self.counts.lost_s += self.drafting_s
        return self._batch.launch({each.request: each.draft for each in fitting})

    def complete(self, step: DecodedStep) -> None:
        """Take a step whose events were made, for `learn`."""
        self._unlearned.append((step, self._launched))
        self._launched = _NOT_LAUNCHED

    def learn(self) -> None:
        """Learn from the completed steps, while the next one runs: a step later, but the device does not wait for it.

        Drafts behind the end of an answer count neither way.
        """
        for step, launched in self._unlearned:
            self._learn(step, launched)
        self._unlearned.clear()

    def _learn(self, step: DecodedStep, launched: _Launched) -> None:
        gained = 0
        for found in step.verified.values() if isinstance(step, VerifiedStep) else ():
            request = step.tokens(found.drafts.row)[0]
            source, accepted = found.drafts.source, len(found.token_ids) - 1
            drafted = accepted if request.ended else len(found.drafts.token_ids)
            wrong = accepted == drafted and request in launched.refused and not request.ended
            self._acceptance.observe(source, drafted + wrong, accepted)
            self.counts.drafted.update((source, position) for position in range(drafted))
            self.counts.accepted.update((source, position) for position in range(accepted))
            gained += accepted
        speedup = 1.0
        if isinstance(step, VerifiedStep):
            row_tokens = 1.0 + gained / len(step.snapshot)
            plain_s, verify_s = launched.seconds()
            saved_s = row_tokens * plain_s - verify_s
            self.counts.saved_s += max(saved_s, 0.0)
            self.counts.lost_s += max(-saved_s, 0.0)
            speedup = row_tokens * plain_s / verify_s if verify_s else 1.0  # nothing is known of the first steps
        self._speedup += _SPEEDUP_WEIGHT * (speedup - self._speedup)

    @property
    def speedup(self) -> float:
        """Tokens per second of recent steps ÷ those that steps without drafts would have given, by predictions.

        At least 1; 1 exactly where drafts are rare.
        """
        return self._speedup if self._speedup > _SPEEDUP_SEEN else 1.0

    def leave(self, request: DecodeRequest) -> None:
        """Forget a request that left the batch."""
        self._refused.pop(request, None)
        if self._known_tokens.pop(request, None) is not None:
            self._proposer.leave(request)

    def _expects_drafts(self, bounds: StepBounds) -> bool:
        """Return True if the step behind the one in flight will probably have drafts."""
        return bool(self._choose(bounds, unknown=1))

    def _choose(self, bounds: StepBounds, unknown: int) -> list[Candidate]:
        """Return the requests that have drafts in a step, each with as many as pay.

        `unknown` is the number of tokens of each request that have not arrived.
        """
        eligible, work = self._eligible(unknown)
        if not eligible:
            return []
        if self.fixed_drafts is not None:
            candidates = [self._candidate(request, unknown).first(self.fixed_drafts) for request in eligible]
            return [each for each in candidates if each.survival]
        chosen: list[Candidate] = []
        least = break_even(bounds.cost, work, kv_read_once=self._batch.kv_read_once)
        if self._acceptance.best() > least:
            candidates = [self._candidate(request, unknown) for request in eligible]
            chosen = with_most_tokens(bounds, work, [each for each in candidates if each.survival])
        if not chosen and self._steps_without >= PROBE_EVERY:
            probed = self._candidate(eligible[self._steps_without % len(eligible)], unknown)
            chosen = [probed] if probed.survival else []
        return chosen

    def _eligible(self, unknown: int) -> tuple[list[DecodeRequest], StepWork]:
        """Return the requests of the next step that may have drafts, and its work without drafts."""
        requests, work = self._batch.next_rows()
        return [request for request in requests if self._may_draft(request, unknown)], work

    def _may_draft(self, request: DecodeRequest, unknown: int) -> bool:
        sampling = request.reservation.sampling
        if request.leaving or sampling.penalized or not sampling.speculate:
            return False
        if request.history is not None and request.history.slow:
            return False
        return self._batch.rows_left(request) > 1 + unknown

    def _candidate(self, request: DecodeRequest, unknown: int) -> Candidate:
        """Return a request with the draft that follows its newest token, which is one of `unknown` that come first."""
        self._update_proposer(request)
        most = min(DRAFTS_MAX, self._batch.rows_left(request) - 1)
        draft = self._proposer.propose(request, most + unknown)
        draft = self._allowed(request, draft)
        survival = self._acceptance.survival(draft.source, len(draft.token_ids))
        if unknown:
            draft, survival = Draft(draft.token_ids[unknown:], draft.source), survival[unknown:]
        return Candidate(request, draft, survival, self._context(request))

    def _allowed(self, request: DecodeRequest, draft: Draft) -> Draft:
        """Return the first tokens of a draft, up to one that the request's grammar refuses."""
        if request.history is None or not draft.token_ids:
            return draft
        grammar = request.reservation.sampling.grammar
        count = self._allowed_drafts(request.history, grammar, draft.token_ids)
        if count == len(draft.token_ids):
            return draft
        if self.refused_count_as_rejected:
            self._refused[request] = count
            if not count:
                self._acceptance.observe(draft.source, 1, 0)
        return Draft(draft.token_ids[:count], draft.source)

    def _context(self, request: DecodeRequest) -> int | None:
        """Return `Candidate.context` of a request."""
        return None if self._batch.kv_read_once else self._batch.next_position(request) + 1

    def _update_proposer(self, request: DecodeRequest) -> None:
        """Give the proposer the tokens of the request that it does not have."""
        answer, known = request.token_ids, self._known_tokens.get(request)
        if known is None:
            reservation = request.reservation
            self._proposer.begin(request, [*reservation.question, *answer], reservation.cache_salt)
        elif known < len(answer):
            self._proposer.extend(request, answer[known:])
        self._known_tokens[request] = len(answer)

    def _positions(self, request: DecodeRequest, wanted: int) -> int:
        """Return the number of drafts for which the request has pages, or gets one that nobody else needs."""
        left = self._batch.positions_left(request)
        if left < wanted and self._batch.grow_ahead(request, self._grow):
            left = self._batch.positions_left(request)
        return left
