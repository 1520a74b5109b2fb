"""Speculative decoding: which requests have draft tokens in a step, and how many.

A proposer predicts the next tokens, and the step verifies them (`drafts.py`). For each draft token, the probability
that it and all draft tokens before it are accepted is estimated from earlier steps. The draft tokens with the highest
probabilities are verified; their number maximizes the expected accepted tokens ÷ the step's predicted duration
(TurboSpec, arXiv 2406.14066). If draft tokens do not raise the throughput, steps are the same as without speculation.
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
from tandem.engine.speculation.proposer import Draft, DraftSource, Proposer
from tandem.engine.steps.batch import TokenRows
from tandem.engine.steps.draft_groups import DRAFTS_MAX

PROBE_EVERY = 64
"""While draft tokens do not raise the throughput, one request gets draft tokens every PROBE_EVERY steps, as a probe."""
_SPEEDUP_WEIGHT = 0.05
"""Weight of the newest step in the moving average of the speed-up."""
_SPEEDUP_SEEN = 1.01
"""The minimum moving average that counts as a speed-up."""


@dataclass(slots=True)
class SpeculationCounts:
    """The counts of draft tokens since the worker started."""

    drafted: Counter[tuple[DraftSource, int]] = field(default_factory=Counter)
    """The number of verified draft tokens, by source and by position in the draft, from 0."""
    accepted: Counter[tuple[DraftSource, int]] = field(default_factory=Counter)
    """The number of accepted draft tokens, by source and by position in the draft, from 0."""
    saved_s: float = 0.0
    """Predicted seconds that draft tokens have saved, summed over the steps in which they saved time."""
    drafting_s: float = 0.0
    """Seconds that a draft model or draft heads took to propose draft tokens."""
    model_bytes: Mapping[str, int] = field(default_factory=dict)
    """The size in bytes of the proposer's `weights` and `kv` pages; empty if it has neither."""
    lost_s: float = 0.0
    """Predicted seconds that draft tokens have cost, summed over the steps in which too few were accepted."""


class _Launched(NamedTuple):
    """The facts of a step that are known when it is launched."""

    cost: StepCost
    work: StepWork
    """The step's work without draft tokens."""
    drafted: Sequence[Candidate]
    """The requests with draft tokens."""
    computing_s: float
    """Seconds that the proposer took to compute the draft tokens."""
    refused: frozenset[DecodeRequest] = frozenset()
    """Requests whose draft was cut off because the grammar refused its next token."""

    def seconds(self) -> tuple[float, float]:
        """Return the predicted seconds of the step without draft tokens, and with them."""
        cost = self.cost
        return cost.seconds(self.work), cost.seconds(with_drafts(self.work, self.drafted)) + self.computing_s


_NOT_LAUNCHED = _Launched(StepCost(), NOTHING, (), 0.0)


class Speculation:
    """Proposes draft tokens and learns how many are accepted.

    Used on the engine thread; other threads may read `counts`. Owned by the decode scheduler.
    """

    refused_count_as_rejected = False
    """True if draft tokens that a grammar refuses count as rejected, because computing them took time."""

    def __init__(
        self,
        proposer: Proposer,
        batch: DraftingBatch,
        grow: Callable[[DecodeRequest], bool],
        allowed_drafts: AllowedDrafts,
    ) -> None:
        """Create the speculation.

        `grow` gives a request one more page, unless another request would have to be preempted for it. `allowed_drafts`
        returns the number of leading draft tokens of a request that its grammar allows.
        """
        self._proposer = proposer
        self._batch = batch
        self._grow = grow
        self._allowed_drafts = allowed_drafts
        self._refused: dict[DecodeRequest, int] = {}
        """Requests whose grammar refused a draft token, each with the number of draft tokens before the refused one."""
        self._acceptance = Acceptance()
        self._known_tokens: dict[DecodeRequest, int] = {}
        """Requests that the proposer knows, each with the number of its answer tokens that the proposer was given."""
        self._steps_without = 0
        """The number of steps since the last step with draft tokens."""
        self.drafting_s = 0.0
        """The time in seconds that proposing took before the newest step was launched."""
        self.counts = SpeculationCounts()
        self.fixed_drafts: int | None = None
        """For measurements: a fixed number of draft tokens per request.

        None = the number that raises the throughput the most.
        """
        self._speedup = 1.0
        self._launched = _NOT_LAUNCHED
        """The newest step that was launched with bounds, until its tokens arrive."""
        self._unlearned: list[tuple[DecodedStep, _Launched]] = []
        """Completed steps from which `learn` has not learned yet, with the facts of their launch."""

    def read_kv_once(self) -> None:
        """Predict the cost of steps under the assumption that attention reads a request's KV once for all its rows."""
        self._batch.kv_read_once = True

    def waits(self, bounds: StepBounds | None) -> bool:
        """Return True if the next step must not be planned before the tokens of the step in flight have arrived.

        If the step in flight verifies draft tokens, the positions of the next step depend on the number of accepted
        ones. If the next step will probably have draft tokens, they are proposed after the newest token.
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
        """Launch the next step and return its rows, or None if there are none.

        With `bounds`, and with no step in flight, the step has draft tokens if they raise the throughput.
        """
        self.drafting_s = 0.0
        self._refused.clear()
        if bounds is None or self._batch.in_flight_steps:
            return self._batch.launch()
        chosen = self._choose(bounds, unknown=0)
        self._steps_without = 0 if chosen else self._steps_without + 1
        fitting = [candidate.first(self._positions(candidate.request, len(candidate.survival))) for candidate in chosen]
        fitting = [candidate for candidate in fitting if candidate.survival]
        refused = frozenset(e.request for e in fitting if len(e.survival) == self._refused.get(e.request))
        self._launched = _Launched(bounds.cost, self._batch.next_rows()[1], fitting, self.drafting_s, refused)
        self.counts.drafting_s += self.drafting_s
        if not fitting:
            self.counts.lost_s += self.drafting_s
        return self._batch.launch({candidate.request: candidate.draft for candidate in fitting})

    def complete(self, step: DecodedStep) -> None:
        """Keep a completed step for `learn`. The caller has created the step's events."""
        self._unlearned.append((step, self._launched))
        self._launched = _NOT_LAUNCHED

    def learn(self) -> None:
        """Update the acceptance probabilities from the completed steps.

        Called while the next step runs, so that the device does not wait; that step was planned without this update.
        Draft tokens after the end of an answer count neither as accepted nor as rejected.
        """
        for step, launched in self._unlearned:
            self._learn(step, launched)
        self._unlearned.clear()

    def _learn(self, step: DecodedStep, launched: _Launched) -> None:
        gained = 0
        for verified_row in step.verified.values() if isinstance(step, VerifiedStep) else ():
            request = step.tokens(verified_row.drafts.row)[0]
            source, accepted = verified_row.drafts.source, len(verified_row.token_ids) - 1
            drafted = accepted if request.ended else len(verified_row.drafts.token_ids)
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
            # `verify_s` is 0 before the cost model has observed a step.
            speedup = row_tokens * plain_s / verify_s if verify_s else 1.0
        self._speedup += _SPEEDUP_WEIGHT * (speedup - self._speedup)

    @property
    def speedup(self) -> float:
        """Tokens per second of recent steps, divided by the predicted value for the same steps without draft tokens.

        At least 1; exactly 1 if draft tokens are rare.
        """
        return self._speedup if self._speedup > _SPEEDUP_SEEN else 1.0

    def leave(self, request: DecodeRequest) -> None:
        """Drop the state of a request that has left the batch."""
        self._refused.pop(request, None)
        if self._known_tokens.pop(request, None) is not None:
            self._proposer.leave(request)

    def _expects_drafts(self, bounds: StepBounds) -> bool:
        """Return True if the step after the one in flight will probably have draft tokens."""
        return bool(self._choose(bounds, unknown=1))

    def _choose(self, bounds: StepBounds, unknown: int) -> list[Candidate]:
        """Return the requests that get draft tokens in a step, each with the number that maximizes the throughput.

        `unknown` is the number of tokens of each request that are still in flight.
        """
        eligible, work = self._eligible(unknown)
        if not eligible:
            return []
        if self.fixed_drafts is not None:
            candidates = [self._candidate(request, unknown).first(self.fixed_drafts) for request in eligible]
            return [candidate for candidate in candidates if candidate.survival]
        chosen: list[Candidate] = []
        least = break_even(bounds.cost, work, kv_read_once=self._batch.kv_read_once)
        if self._acceptance.best() > least:
            candidates = [self._candidate(request, unknown) for request in eligible]
            chosen = with_most_tokens(bounds, work, [candidate for candidate in candidates if candidate.survival])
        if not chosen and self._steps_without >= PROBE_EVERY:
            probed = self._candidate(eligible[self._steps_without % len(eligible)], unknown)
            chosen = [probed] if probed.survival else []
        return chosen

    def _eligible(self, unknown: int) -> tuple[list[DecodeRequest], StepWork]:
        """Return the requests of the next step that may have draft tokens, and the step's work without them."""
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
        """Return a request with its draft, less the first `unknown` draft tokens.

        The proposer also predicts the request's `unknown` tokens in flight, which are no draft tokens of the next step.
        """
        self._update_proposer(request)
        most = min(DRAFTS_MAX, self._batch.rows_left(request) - 1)
        draft = self._proposer.propose(request, most + unknown)
        draft = self._allowed(request, draft)
        survival = self._acceptance.survival(draft.source, len(draft.token_ids))
        if unknown:
            draft, survival = Draft(draft.token_ids[unknown:], draft.source), survival[unknown:]
        return Candidate(request, draft, survival, self._context(request))

    def _allowed(self, request: DecodeRequest, draft: Draft) -> Draft:
        """Return the leading tokens of a draft that the request's grammar allows."""
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
        """Pass to the proposer the request's tokens that it does not have yet."""
        answer, known = request.token_ids, self._known_tokens.get(request)
        if known is None:
            reservation = request.reservation
            self._proposer.begin(request, [*reservation.original_prompt, *answer], reservation.cache_salt)
        elif known < len(answer):
            self._proposer.extend(request, answer[known:])
        self._known_tokens[request] = len(answer)

    def _positions(self, request: DecodeRequest, wanted: int) -> int:
        """Return the number of draft tokens for which the request has pages.

        It is at most the number that a step can verify. If it is less than `wanted`, the request first gets one more
        page, unless another request needs the page.
        """
        wanted = self._batch.verifiable(request, wanted)
        left = min(wanted, self._batch.positions_left(request))
        if left < wanted and self._batch.grow_ahead(request, self._grow):
            left = min(wanted, self._batch.positions_left(request))
        return left
