"""What the engine computes in one step: rows of tokens, each row a piece of one request.

A decode row is a piece of one token, a prefill row a chunk of the prompt; the engine does not tell them apart
by name, only by length.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from wire.messages import SamplingParams, TokenLogprobs


@dataclass(slots=True, eq=False)
class History:
    """What penalties look back on. The half that runs the request makes one and keeps it for all its draws.

    `answer` holds the tokens that are here, one less than there are where the row's own token is still on its way
    (`StepRow.source`). It grows between steps; engines read it while a step is launched. An engine may keep what it
    counted of a history for the next draw: nobody needs to tell it that the request has ended.
    """

    prompt: Sequence[int]
    answer: Sequence[int]


@dataclass(frozen=True, slots=True)
class Draw:
    """Sample the token that follows the row's last one.

    `index` is the number of this draw in the request's seeded sequence (0 for the first token of the answer), so
    that any worker, in any batch, draws the same number. `history` is there if `sampling` has penalties, else None.
    """

    sampling: SamplingParams
    index: int
    history: History | None = None


class StepRow(NamedTuple):
    """A piece of one request; a tuple, as one is made for each request and step.

    `token_ids` take the positions `start`, `start + 1`, …; the KV of positions 0..start-1 is already in `page_ids`,
    which also have room for the new ones (page i holds positions i·page_tokens ..). The pages stay the caller's.
    `draw` is None for every chunk of a prompt but the last.

    With a `source` the row's only token is the one that row number `source` of the step launched just before draws,
    which may still be running; the id in `token_ids` then means nothing.
    """

    token_ids: Sequence[int]
    start: int
    page_ids: Sequence[int]
    draw: Draw | None
    source: int | None = None


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The rows of one step, at least one; no page is written by two rows."""

    rows: Sequence[StepRow]


@dataclass(frozen=True, slots=True)
class StepResult:
    """One sampled token id for each row, None where the row asked for no draw.

    `logprobs` is empty if no row asked for any, else has one entry for each row, None where it did not.
    """

    token_ids: Sequence[int | None]
    logprobs: Sequence[TokenLogprobs | None] = ()

    def split(self, rows: int) -> tuple["StepResult", "StepResult"]:
        """The results of the first `rows` rows, and of the others."""
        first, others = slice(rows), slice(rows, None)
        return (
            StepResult(self.token_ids[first], self.logprobs[first]),
            StepResult(self.token_ids[others], self.logprobs[others]),
        )


PendingStep = Callable[[], StepResult]
"""A step that was launched: called once, waits for its result. Raises what the device reports."""


def rows_of(drawn: Sequence[int], batch: StepBatch, logprobs: Sequence[TokenLogprobs | None] = ()) -> StepResult:
    """The tokens of the rows with a draw, in their order, each put at its row; their log probabilities if any asked."""
    tokens, scores = iter(drawn), iter(logprobs)
    token_ids = [None if row.draw is None else next(tokens) for row in batch.rows]
    if not logprobs:
        return StepResult(token_ids)
    return StepResult(token_ids, [None if row.draw is None else next(scores) for row in batch.rows])


def scores_of(
    draws: Sequence[Draw], values: Sequence[Sequence[float]], top_ids: Sequence[Sequence[int]]
) -> list[TokenLogprobs | None]:
    """One entry for each draw, None where it asks for no log probabilities.

    For those that ask, in their order: `values`, of the drawn token and then of the most likely ones, and the most
    likely tokens' `top_ids`; as many as any of them asks for.
    """
    scores = iter(zip(values, top_ids, strict=True))
    return [_score(each.sampling.logprobs, *next(scores)) if wants_logprobs(each) else None for each in draws]


def wants_logprobs(draw: Draw) -> bool:
    """Whether log probabilities go with this draw's token."""
    return draw.sampling.logprobs is not None


def _score(top: int | None, values: Sequence[float], top_ids: Sequence[int]) -> TokenLogprobs:
    count = top or 0
    return TokenLogprobs(values[0], tuple(top_ids[:count]), tuple(values[1 : 1 + count]))
