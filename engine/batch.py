"""What the engine computes in one step: rows of tokens, each row a piece of one request.

A decode row is a piece of one token, a prefill row a chunk of the prompt; the engine does not tell them apart
by name, only by length.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from wire.messages import SamplingParams


@dataclass(frozen=True, slots=True)
class Draw:
    """Sample the token that follows the row's last one.

    `index` is the number of this draw in the request's seeded sequence (0 for the first token of the answer), so
    that any worker, in any batch, draws the same number.
    """

    sampling: SamplingParams
    index: int


@dataclass(frozen=True, slots=True)
class StepRow:
    """A piece of one request.

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
    """One sampled token id for each row, None where the row asked for no draw."""

    token_ids: Sequence[int | None]


PendingStep = Callable[[], StepResult]
"""A step that was launched: called once, waits for its result. Raises what the device reports."""


def rows_of(drawn: Sequence[int], batch: StepBatch) -> StepResult:
    """The tokens of the rows with a draw, in their order, each put at its row."""
    tokens = iter(drawn)
    return StepResult([None if row.draw is None else next(tokens) for row in batch.rows])
