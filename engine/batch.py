"""What the engine computes in one step: rows of tokens, each row a piece of one request.

A decode row is a piece of one token, a prefill row a chunk of the prompt; the engine does not tell them apart
by name, only by length.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from engine.draws import Draw, Draws, History
from engine.token_rows import StepRow, TokenRows
from wire.messages import TokenLogprobs

__all__ = [
    "Draw",
    "History",
    "PendingStep",
    "StepBatch",
    "StepResult",
    "StepRow",
    "TokenRows",
    "rows_of",
    "scores_of",
    "wants_logprobs",
]

_Drawn = TypeVar("_Drawn")


class StepBatch:
    """The rows of one step, at least one; no page is written by two rows.

    Those of `tokens` come first, and `chunks`, of any length, behind them.
    """

    __slots__ = ("chunks", "tokens")

    def __init__(self, rows: Sequence[StepRow], tokens: TokenRows | None = None) -> None:
        """`rows` behind `tokens`; None: the first of `rows` that have one token and draw become columns."""
        self.tokens = TokenRows.of(rows) if tokens is None else tokens
        self.chunks = rows[len(self.tokens) :] if tokens is None else rows

    def __len__(self) -> int:
        return len(self.tokens) + len(self.chunks)

    @property
    def rows(self) -> Sequence[StepRow]:
        """All of them as objects, made anew each time."""
        return [*self.tokens, *self.chunks]

    @property
    def draws(self) -> Draws:
        """Of the rows that draw, in their order."""
        draws = self.tokens.columns.draws
        return draws.followed_by([row.draw for row in self.chunks if row.draw is not None]) if self.chunks else draws


@dataclass(frozen=True, slots=True)
class StepResult:
    """One sampled token id for each row, None where the row asked for no draw.

    `logprobs` is empty if no row asked for any, else has one entry for each row, None where it did not.
    """

    token_ids: Sequence[int | None]
    logprobs: Sequence[TokenLogprobs | None] = ()

    def split(self, rows: int) -> tuple["StepResult", "StepResult"]:
        """The results of the first `rows` rows, and of the others."""
        if rows == len(self.token_ids):
            return self, NO_RESULT
        first, others = slice(rows), slice(rows, None)
        return (
            StepResult(self.token_ids[first], self.logprobs[first]),
            StepResult(self.token_ids[others], self.logprobs[others]),
        )


NO_RESULT = StepResult(())

PendingStep = Callable[[], StepResult]
"""A step that was launched: called once, waits for its result. Raises what the device reports."""


def rows_of(drawn: Sequence[int], batch: StepBatch, logprobs: Sequence[TokenLogprobs | None] = ()) -> StepResult:
    """The tokens of the rows with a draw, in their order, each put at its row; their log probabilities if any asked."""
    if not batch.chunks:
        return StepResult(drawn, logprobs)
    singles = len(batch.tokens)
    return StepResult(
        [*drawn[:singles], *_at_their_rows(drawn[singles:], batch.chunks)],
        [*logprobs[:singles], *_at_their_rows(logprobs[singles:], batch.chunks)] if logprobs else (),
    )


def _at_their_rows(drawn: Sequence[_Drawn], chunks: Sequence[StepRow]) -> list[_Drawn | None]:
    each = iter(drawn)
    return [None if row.draw is None else next(each) for row in chunks]


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
