"""Speculative decoding with a draft model or draft heads, whose proposals take time.

One step of the proposer computes the first draft token of every request, the next step the second, and so on. All
requests therefore have the same number of draft tokens. Two fitted cost models predict the duration of the step and of
the proposer's steps before it; the number with the most tokens per second is chosen.

A draft model first needs the KV of a request's context. This KV is computed only if that takes less time than draft
tokens are predicted to save before the answer ends. It is computed in chunks between the steps of the batch; until it
is complete, the request has no draft tokens.
"""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from decode_worker.batch_snapshot import DecodedStep
from decode_worker.draft_choice import GAIN_MIN, ROWS_MAX, Candidate, StepBounds
from decode_worker.drafting_batch import DraftingBatch
from decode_worker.request import DecodeRequest
from decode_worker.speculation import PROBE_EVERY, Speculation
from tandem.cost_model.acceptance import Acceptance
from tandem.cost_model.step_cost import StepCost
from tandem.cost_model.step_work import NOTHING, StepWork, chunk_pairs
from tandem.engine.grammar_masks import AllowedDrafts
from tandem.engine.speculation.proposer import BatchProposer, Draft, Proposer, WantedDraft
from tandem.engine.steps.draft_groups import DRAFTS_MAX
from tandem.engine.steps.sampling_metadata import SamplingInput

MISSING_MAX = DRAFTS_MAX + 1
"""Draft tokens are proposed for a request only if at most this number of its tokens have no KV in the proposer.

Each of these tokens is a row of the proposer's first step. If more tokens have no KV, the proposer first computes a
chunk of the context.
"""


@dataclass(frozen=True, slots=True)
class DraftCount:
    """A number of draft tokens per request in a step, with the predicted times."""

    drafts: int
    """The number of draft tokens of each request."""
    seconds: float
    """Predicted duration of the step together with the proposer's steps before it, in seconds."""
    saved_s: float
    """Predicted seconds that draft tokens save for each token of a request, on average over the step's requests.

    It is the duration of a step without draft tokens, less `seconds` divided by the mean number of tokens that a
    request gains in the step.
    """


@dataclass(frozen=True, slots=True)
class _Plan:
    """The work that the proposer does before the next step."""

    drafts: dict[DecodeRequest, int] = field(default_factory=dict)
    """Requests for which draft tokens are proposed, each with its number of draft tokens."""
    pieces: dict[Hashable, int] = field(default_factory=dict)
    """Requests whose context KV the proposer computes before this step, each with the number of tokens of the chunk."""

    def __bool__(self) -> bool:
        return bool(self.drafts or self.pieces)


_NO_PLAN = _Plan()


class ModelSpeculation(Speculation):
    """Speculation with a proposer that computes the draft tokens of all requests in one batch.

    Used on the engine thread only.
    """

    refused_count_as_rejected = True

    def __init__(
        self,
        proposer: BatchProposer,
        batch: DraftingBatch,
        grow: Callable[[DecodeRequest], bool],
        allowed_drafts: AllowedDrafts,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Create the speculation; `clock` returns seconds. The other arguments are those of `Speculation`."""
        super().__init__(proposer, batch, grow, allowed_drafts)
        self._model = proposer
        self._clock = clock
        self.counts.model_bytes = proposer.memory
        # The prior is optimistic, so that a new draft model is tried at all; a few rejected draft tokens correct the
        # prior (docs/decisions/speculative_decoding.md).
        self._acceptance = Acceptance(prior=1.0)
        self._newest: DecodedStep | None = None
        """The newest step whose tokens have arrived."""
        self._probed: DecodeRequest | None = None
        """The request that gets one draft token as a probe; set while the proposer computes its context."""

    def leave(self, request: DecodeRequest) -> None:
        """Drop the state of a request that has left the batch."""
        super().leave(request)
        if request is self._probed:
            self._probed = None
        if not self._batch.requests:
            self._newest = None  # the step would keep the last requests alive

    def complete(self, step: DecodedStep) -> None:
        """Keep a completed step for `learn` and as the newest step. The caller has created the step's events."""
        super().complete(step)
        self._newest = step

    def _expects_drafts(self, bounds: StepBounds) -> bool:
        """Return True if the next step will have draft tokens, or if the proposer will compute context KV before it.

        Computing context needs the device as well, so the next step is not launched early in either case.
        """
        return bool(self._plan(bounds, unknown=1))

    def _choose(self, bounds: StepBounds, unknown: int) -> list[Candidate]:
        """Compute context KV and draft tokens, and return the requests that have draft tokens."""
        plan = self._plan(bounds, unknown)
        if not plan:
            return []
        wanted = {request: min(drafts, self._positions(request, drafts)) for request, drafts in plan.drafts.items()}
        wanted = {request: drafts for request, drafts in wanted.items() if drafts}
        began = self._clock()
        if plan.pieces:
            self._model.store_context(plan.pieces)
        proposed = self._model.compute(self._wanted(wanted)) if wanted else ()
        self.drafting_s = self._clock() - began
        if self._probed in wanted:
            self._probed = None
        drafts = [
            self._allowed(request, Draft(tokens, self._model.source))
            for request, tokens in zip(wanted, proposed, strict=True)
        ]
        return [
            Candidate(request, draft, self._survival(len(draft.token_ids)), self._context(request))
            for request, draft in zip(wanted, drafts, strict=True)
            if draft.token_ids
        ]

    def _wanted(self, drafts: Mapping[DecodeRequest, int]) -> list[WantedDraft]:
        drew: dict[DecodeRequest, Sequence[int]] = {}
        if (step := self._newest) is not None:
            drew = {slot.request: step.rows_of(row) for row, slot in enumerate(step.snapshot.slots)}
        return [
            WantedDraft(request, self._draws(request, count), drew.get(request, ()))
            for request, count in drafts.items()
        ]

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
        for candidate in eligible:
            missing = self._model.missing(candidate)
            if missing <= MISSING_MAX and rows + missing <= self._model.max_step_tokens:
                ready.append(candidate)
                rows += missing
        now = every if len(ready) == len(eligible) else self._count(bounds, work, ready)
        drafts = {request: self._draft_capacity(request, now.drafts) for request in ready} if now.drafts else {}
        waiting = [request for request in eligible if self._model.missing(request) > MISSING_MAX]
        return _Plan(
            {request: count for request, count in drafts.items() if count},
            self._pieces(bounds, work, waiting, now.seconds, every.saved_s / len(eligible)),
        )

    def _count(self, bounds: StepBounds, work: StepWork, requests: Sequence[DecodeRequest]) -> DraftCount:
        """Return the number of draft tokens, the same for all `requests`, that gives the most tokens per second.

        It is 0 if the gain is less than GAIN_MIN.
        """
        context = sum(self._batch.next_position(request) + 1 for request in requests)
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
        fitting = [count for count in counts if count.seconds <= bounds.seconds and count.drafts]
        best = max(fitting, key=lambda count: count.saved_s, default=plain)
        return best if best.saved_s > (1 - 1 / GAIN_MIN) * plain.seconds else plain

    def _probe(self, bounds: StepBounds, work: StepWork, eligible: Sequence[DecodeRequest]) -> _Plan:
        """Return the plan of a probe: one draft token for one request, or first a chunk of the request's context.

        A probe measures the acceptance while draft tokens do not raise the throughput. It is made for the request with
        the least context to compute. The plan is empty unless the probe takes at most 1 / PROBE_EVERY of the time since
        the last step with draft tokens.
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
        drafts = self._draft_capacity(request, 1)
        return _Plan({request: drafts}) if drafts else _NO_PLAN

    def _pieces(
        self,
        bounds: StepBounds,
        work: StepWork,
        waiting: Sequence[DecodeRequest],
        step_s: float,
        saved_s: float | None,
    ) -> dict[Hashable, int]:
        """Return for each request the number of context tokens to compute before a step that takes `step_s` seconds.

        Requests with the fewest missing tokens come first. The computation takes at most as long as a step without
        draft tokens, plus the computation's fixed cost. Computation and step together take at most `bounds.seconds`.

        `saved_s`: seconds that draft tokens save per token of a request. A request is skipped if its savings before the
        end of its answer do not exceed the time to compute its context. None = no request is skipped.
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
            if self._model.capacity(request, 1):
                pieces[request] = tokens
                stored = stored.with_chunk(tokens, end + 1 - missing)
        return pieces

    def _chunk(self, seconds: float, context: int) -> int:
        """Return the maximum number of tokens whose KV the proposer can compute in `seconds`.

        The tokens follow a context of `context` tokens.
        """
        return self._model.cost.tokens_within(seconds, 0, 0, context)

    def _missing(self, request: DecodeRequest) -> int:
        """Return the number of the request's tokens without KV in the proposer, which may not know the request yet."""
        if request in self._known_tokens:
            return self._model.missing(request)
        return self._model.missing_at_first(self._batch.next_position(request) + 1)

    def _draft_capacity(self, request: DecodeRequest, drafts: int) -> int:
        return self._model.capacity(request, min(drafts, self._batch.rows_left(request) - 1))

    def _rest(self, request: DecodeRequest) -> int:
        """Return the expected number of further tokens of the answer, derived from the request's committed pages."""
        expected = self._batch.kv.tokens_in(request.committed, decoding=True) - self._batch.next_position(request)
        return min(expected, self._batch.rows_left(request))

    @staticmethod
    def _draws(request: DecodeRequest, drafts: int) -> list[SamplingInput]:
        """Return the sampling inputs of the next `drafts` tokens, without logit biases, penalties and a minimum length.

        If the request has a history, for example because of a grammar, all inputs share the history of the answer so
        far.
        """
        sampling = request.reservation.sampling
        first = request.first_draw + len(request.token_ids) - 1
        drawn = replace(
            sampling,
            max_tokens=1,
            min_tokens=0,
            logit_bias=(),
            frequency_penalty=0.0,
            presence_penalty=0.0,
            repetition_penalty=1.0,
            logprobs=None,
            prompt_logprobs=None,
        )
        return [SamplingInput(drawn, first + draft, request.history) for draft in range(drafts)]


@dataclass(frozen=True, slots=True)
class DraftCosts:
    """Predicts the duration of a step in which some requests have draft tokens, and of the proposer's steps."""

    verify: StepCost
    """The cost model of the target model's steps."""
    propose: StepCost
    """The cost model of the proposer's steps."""
    work: StepWork
    """The step's work without draft tokens."""
    requests: int
    """The number of requests with draft tokens."""
    context: int
    """The number of tokens that the rows of these requests attend to, summed."""

    def count(self, survival: Sequence[float], *, kv_read_once: bool) -> DraftCount:
        """Return the predicted times of a step with `len(survival)` draft tokens per request.

        `survival` has for each draft token the probability that it and all draft tokens before it are accepted.
        """
        drafts, rows, work = len(survival), self.requests, self.work
        more = 0 if kv_read_once else sum(self.context + rows * (draft + 1) for draft in range(drafts))
        seconds = self.verify.seconds(work.with_drafts(rows * drafts, more))
        if drafts:
            # If all draft tokens of the previous step were accepted, the proposer has no KV of the last of them yet,
            # which costs one more row.
            fed = rows * survival[-1]
            first_s = self.propose.rows_seconds(rows, self.context) + fed * self.propose.parameters.row_s
            others = (self.propose.rows_seconds(rows, self.context + rows * draft) for draft in range(1, drafts))
            seconds += first_s + sum(others)
        tokens = 1.0 + rows * sum(survival) / work.decode_rows
        plain_s = self.verify.seconds(work)
        return DraftCount(drafts, seconds, plain_s - seconds / tokens)


def _store_seconds(cost: StepCost, missing: int, end: int, chunk: int) -> tuple[float, int]:
    """Return the duration in seconds, and the number of steps, of computing the KV of `missing` tokens.

    The tokens end at position `end`; each step computes at most `chunk` of them.
    """
    return cost.prefill_seconds(missing, chunk_pairs(missing, max(0, end + 1 - missing)), chunk)


def speculation_of(
    proposer: Proposer,
    batch: DraftingBatch,
    grow: Callable[[DecodeRequest], bool],
    allowed_drafts: AllowedDrafts,
) -> Speculation:
    """Return a `ModelSpeculation` for a `BatchProposer`, and a `Speculation` for every other proposer."""
    if isinstance(proposer, BatchProposer):
        return ModelSpeculation(proposer, batch, grow, allowed_drafts)
    return Speculation(proposer, batch, grow, allowed_drafts)
