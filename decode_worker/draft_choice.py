"""Chooses the requests that have drafts in a step, each with as many as give the most tokens per second."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from decode_worker.request import DecodeRequest
from tandem.cost_model.step_cost import StepCost
from tandem.cost_model.step_work import StepWork
from tandem.engine.speculation.proposer import DRAFTS_MAX, Draft

ROWS_MAX = 256
"""The most rows of a step with drafts: with more, products take so much longer that drafts hardly pay."""
GAIN_MIN = 1.03
"""The least predicted gain in tokens per second for which a step has drafts: predictions err by a few percent."""


@dataclass(frozen=True, slots=True)
class StepBounds:
    """The bounds of a step with drafts, and the cost model that predicts its duration."""

    cost: StepCost
    seconds: float
    """The longest step that keeps the gap targets of all requests."""
    rows: int
    """The most rows, drafts included."""


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
        draft = Draft(self.draft.token_ids[:drafts], self.draft.source)
        return Candidate(self.request, draft, self.survival[:drafts], self.context)


def break_even(cost: StepCost, work: StepWork, *, kv_read_once: bool = False) -> float:
    """Return the least probability of acceptance for which drafts can pay in a step with `work`.

    1 where nothing is known of the duration. `kv_read_once`: a draft's row reads no KV that another does not read.

    With probability p, k drafts of each request give p + p² + … + pᵏ tokens more, which is at most k · p and less than
    p / (1 - p). They take (verify_base + k · rows of drafts) of a step's seconds without.
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
    """Return the work of a step with rows for all drafts of the candidates."""
    rows = sum(len(each.survival) for each in candidates)
    context = sum(each.context_of(draft) for each in candidates for draft in range(len(each.survival)))
    return work.with_drafts(rows, context)


def with_most_tokens(bounds: StepBounds, work: StepWork, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates with so many of their drafts that the tokens per second of the step are most.

    Empty if the gain is less than GAIN_MIN. Requests whose drafts are worth the same are decided on together, position
    by position, the most worth first: among drafts of one worth, the tokens per second are most with all or with none.
    """
    alike: dict[tuple[float, ...], list[int]] = {}
    for number, each in enumerate(candidates):
        alike.setdefault(tuple(each.survival), []).append(number)
    positions = [(-worth, position, survival) for survival in alike for position, worth in enumerate(survival)]
    rows = work.decode_rows
    tokens, seconds = float(rows), bounds.cost.decode_step_seconds(rows, work.decode_context_tokens)
    most, room = GAIN_MIN * tokens / seconds, min(bounds.rows, ROWS_MAX) - rows
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
        count = max(0, min(len(numbers), room, fitting))
        added.append(numbers[:count])
        tokens, seconds, room = tokens - negative * count, seconds + row_s * count, room - count
        if tokens / seconds >= most:
            most, chosen = tokens / seconds, len(added)
        if count < len(numbers):
            break
    counts = Counter(chain.from_iterable(added[:chosen]))
    return [each.first(counts[number]) for number, each in enumerate(candidates) if counts[number]]
