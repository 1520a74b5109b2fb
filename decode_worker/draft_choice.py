"""Which requests have drafts in a step, and how many: as many as give the most tokens per second."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from costs.step_cost import StepCost
from costs.step_work import StepWork
from decode_worker.request import DecodeRequest
from engine.speculation.proposer import Draft

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
    draft_s: float = 0.0
    """The seconds before a step that computing drafts takes, for each position of the longest one."""


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
        return replace(self, survival=self.survival[:drafts]).drafted(self.draft.token_ids[:drafts])

    def drafted(self, token_ids: Sequence[int]) -> "Candidate":
        """Return the candidate with these tokens as its draft, at most as many as it has."""
        draft = Draft(token_ids, self.draft.match)
        return replace(self, draft=draft, survival=self.survival[: len(token_ids)])


def break_even(cost: StepCost, work: StepWork, *, kv_read_once: bool = False, draft_s: float = 0.0) -> float:
    """Return the least probability of acceptance for which one draft of each request pays in a step with `work`.

    1 where nothing is known of the duration. `kv_read_once`: a draft's row reads no KV that another does not read.
    `draft_s`: see `StepBounds`.
    """
    seconds = cost.decode_step_seconds(work.decode_rows, work.decode_context_tokens)
    if not seconds:
        return 1.0
    context = 0 if kv_read_once else work.decode_context_tokens // work.decode_rows
    more = cost.decode_step_seconds(work.decode_rows + 1, work.decode_context_tokens + context)
    return (work.decode_rows * (more - seconds) + draft_s) / seconds


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
    more_s += bounds.draft_s * (np.maximum.accumulate(draft) + 1)
    plain_s = bounds.cost.decode_step_seconds(rows, context)
    seconds = plain_s + more_s
    most = min(max(0, min(bounds.rows, ROWS_MAX) - rows), int(np.searchsorted(seconds, bounds.seconds, side="right")))
    rates = (rows + np.cumsum(worth))[:most] / seconds[:most]
    if not most or rates.max() < GAIN_MIN * rows / plain_s:
        return []
    chosen = np.bincount(index[: int(rates.argmax()) + 1], minlength=len(counts)).tolist()
    return [each.first(count) for each, count in zip(candidates, chosen, strict=True) if count]
