"""What the engine computes in one step: rows of tokens, each row a piece of one request.

A decode row is a piece of one token, a prefill row a chunk of the prompt; the engine does not tell them apart
by name, only by length.
"""

from collections.abc import Sequence
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
    """

    token_ids: Sequence[int]
    start: int
    page_ids: Sequence[int]
    draw: Draw | None


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The rows of one step, at least one; no page is written by two rows."""

    rows: Sequence[StepRow]


@dataclass(frozen=True, slots=True)
class StepResult:
    """One sampled token id for each row, None where the row asked for no draw."""

    token_ids: Sequence[int | None]
