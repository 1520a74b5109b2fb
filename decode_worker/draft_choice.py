"""Chooses the requests that get draft tokens in a step, and how many, to maximize the tokens per second."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from decode_worker.request import DecodeRequest
from tandem.cost_model.step_cost import StepCost
from tandem.cost_model.step_work import StepWork
from tandem.engine.speculation.proposer import Draft
from tandem.engine.steps.draft_groups import DRAFTS_MAX

ROWS_MAX = 256
"""Maximum number of rows of a step with draft tokens.

With more rows, matrix products take so much longer that draft tokens hardly raise the throughput.
"""
GAIN_MIN = 1.03
"""Draft tokens are used only if they multiply the predicted tokens per second by at least this factor.

Predictions err by a few percent.
"""


@dataclass(frozen=True, slots=True)
class StepBounds:
    """The bounds of a step with draft tokens, and the cost model that predicts its duration."""

    cost: StepCost
    seconds: float
    """Maximum duration of the step in seconds; infinite if there is no limit.

    The smaller of the worker's own ITL target and the strictest request target that the batch can meet without draft
    tokens (`strictest_feasible_target`).
    """
    rows: int
    """Maximum number of rows of the step, draft tokens included."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request with draft tokens, and the probability that each of them is accepted."""

    request: DecodeRequest
    draft: Draft
    survival: list[float]
    """For each draft token, the probability that it and all draft tokens before it are accepted."""
    context: int | None
    """The number of tokens that the newest token's row attends to, itself included.

    None if attention reads the request's KV once for all its rows."""

    def context_of(self, draft: int) -> int:
        """Return the number of tokens whose KV is read for the row of draft token `draft`, counted from 0."""
        return 0 if self.context is None else self.context + draft + 1

    def first(self, drafts: int) -> "Candidate":
        """Return the candidate with only its first `drafts` draft tokens."""
        if drafts >= len(self.survival):
            return self
        draft = Draft(self.draft.token_ids[:drafts], self.draft.source)
        return Candidate(self.request, draft, self.survival[:drafts], self.context)


def break_even(cost: StepCost, work: StepWork, *, kv_read_once: bool = False) -> float:
    """Return the acceptance probability below which draft tokens cannot raise the throughput of a step with `work`.

    Returns 1 if the cost model cannot predict the duration. `kv_read_once`: attention reads a request's KV once for all
    its rows.

    With acceptance probability p, k draft tokens per request yield p + p² + … + pᵏ additional tokens, which is at most
    k · p and less than p / (1 - p). The draft tokens lengthen the step by the fraction base + k · rows, where base is
    due to `verify_base_s`, and rows to one more row per request. The throughput can only rise if the additional tokens
    exceed this fraction, so p must exceed both rows + base / DRAFTS_MAX and (base + rows) / (1 + base + rows).
    """
    seconds = cost.decode_step_seconds(work.decode_rows, work.decode_context_tokens)
    if not seconds:
        return 1.0
    context = 0 if kv_read_once else work.decode_context_tokens // work.decode_rows
    more = cost.decode_step_seconds(work.decode_rows + 1, work.decode_context_tokens + context)
    rows, base = work.decode_rows * (more - seconds) / seconds, cost.parameters.verify_base_s / seconds
    one = rows + base
    return max(rows + base / DRAFTS_MAX, one / (1.0 + one))


def with_drafts(work: StepWork, candidates: Sequence[Candidate]) -> StepWork:
    """Return `work` plus one row for each draft token of the candidates."""
    rows = sum(len(candidate.survival) for candidate in candidates)
    context = sum(candidate.context_of(draft) for candidate in candidates for draft in range(len(candidate.survival)))
    return work.with_drafts(rows, context)


def with_most_tokens(bounds: StepBounds, work: StepWork, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates that get draft tokens, each cut to the number that maximizes the step's tokens per second.

    Returns an empty list if the gain is less than GAIN_MIN. Requests with equal acceptance probabilities are decided on
    together, position by position, the highest probability first. Draft tokens of equal probability are all taken or
    all left out, because one of the two gives the most tokens per second.
    """
    alike: dict[tuple[float, ...], list[int]] = {}
    for number, candidate in enumerate(candidates):
        alike.setdefault(tuple(candidate.survival), []).append(number)
    positions = [(-worth, position, survival) for survival in alike for position, worth in enumerate(survival)]
    rows = work.decode_rows
    tokens, seconds = float(rows), bounds.cost.decode_step_seconds(rows, work.decode_context_tokens)
    most, capacity = GAIN_MIN * tokens / seconds, min(bounds.rows, ROWS_MAX) - rows
    seconds += bounds.cost.parameters.verify_base_s
    added: list[Sequence[int]] = []
    chosen = 0
    for negative, position, survival in sorted(positions):
        numbers = alike[survival]
        read = 0.0
        if candidates[numbers[0]].context is not None:
            read = sum(candidates[number].context_of(position) for number in numbers) / len(numbers)
        row_s = bounds.cost.row_seconds(read)
        spare_s = bounds.seconds - seconds
        fitting = len(numbers) if len(numbers) * row_s <= spare_s else int(spare_s / row_s) if spare_s > 0.0 else 0
        count = max(0, min(len(numbers), capacity, fitting))
        added.append(numbers[:count])
        tokens, seconds, capacity = tokens - negative * count, seconds + row_s * count, capacity - count
        if tokens / seconds >= most:
            most, chosen = tokens / seconds, len(added)
        if count < len(numbers):
            break
    counts = Counter(chain.from_iterable(added[:chosen]))
    return [candidate.first(counts[number]) for number, candidate in enumerate(candidates) if counts[number]]
