"""The batch of one step: rows of tokens; each row has consecutive tokens of one request.

A decode row has one token; a prefill row is a chunk of a prompt. The engine tells them apart only by their length. Rows
of one token are stored as columns, that is, one array for each field of a row, and can also be read as objects. So a
decode step of hundreds of rows is built, packed and sampled in a few array operations; creating an object for each row
would take longer than a small model's step.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from tandem.engine.steps.prompt_scoring import PromptScores
from tandem.engine.steps.sampling_metadata import SamplingInput, SamplingMetadata
from tandem.protocol.messages import TokenLogprobs

_Drawn = TypeVar("_Drawn")

FROM_HOST = -1
"""The value in `RowColumns.sources` of a row whose token id the host knows."""


class StepRow(NamedTuple):
    """A row of a step: consecutive tokens of one request.

    `token_ids` are at the positions `start`, `start + 1`, …; the KV of positions 0 .. start - 1 is already stored in
    the pages `page_ids`, which also have space for the new tokens. Page n of group g (`tandem/engine/config/kv.py`) is
    entry n · groups + g, and holds the positions from n · page_tokens on; entries of pages outside the row's attention
    window are ignored. The caller keeps ownership of the pages.

    `draw` is the sampling input of the next token; it is None for each chunk of a prompt but the last. `scores`
    receives the log probabilities of the row's tokens if its prompt is scored. `adapter` counts from 1; 0 is the base
    model.

    With a `source`, the row has a single token: the one that row number `source` of the previous step samples. The
    previous step may still be running, so the host does not know that token yet, and the id in `token_ids` is ignored.
    """

    token_ids: Sequence[int]
    start: int
    page_ids: Sequence[int]
    draw: SamplingInput | None
    source: int | None = None
    scores: PromptScores | None = None
    adapter: int = 0


class RowColumns(NamedTuple):
    """Rows of one token each, as columns; all of them sample a token.

    The pages in `table` are valid until the next step is planned; the other arrays do not change.
    """

    token_ids: NDArray[np.int64]
    """[n]: the token id of each row."""
    position_offset: NDArray[np.int64]
    """[n]: the position of each row's token minus `step`; the array is equal in consecutive steps."""
    step: int
    sources: NDArray[np.int32]
    """[n]: the row of the previous step that samples the row's token (`StepRow.source`), or FROM_HOST."""
    slot_indices: NDArray[np.intp]
    """[n]: the slot of each row in `table`, `page_counts` and `adapters`."""
    table: NDArray[np.int32]
    """[slots, at least max(page_counts)]: the page ids of each slot as in `StepRow`; later entries are ignored."""
    page_counts: NDArray[np.int32]
    """[slots]: the number of page entries of each slot."""
    adapters: NDArray[np.int32]
    """[slots]: the adapter number of each slot, as in `StepRow`."""
    longest: int
    """The maximum context length of any row in tokens, including the row's own token; 0 without rows."""
    draws: SamplingMetadata


class TokenRows(Sequence[StepRow]):
    """A sequence of rows of one token each.

    The columns are built at the first access, which must happen before the next step is planned. The simulation never
    accesses them, so they are not built there.
    """

    __slots__ = ("_columns", "_make", "_rows", "context_tokens")

    def __init__(self, rows: int, context_tokens: int, make: Callable[[], RowColumns]) -> None:
        """Create a sequence of `rows` rows, whose columns `make` builds at the first access.

        `context_tokens` is the sum of the context lengths of all rows, including each row's own token.
        """
        self._rows = rows
        self.context_tokens = context_tokens
        self._make = make
        self._columns: RowColumns | None = None

    @classmethod
    def of(cls, rows: Sequence[StepRow]) -> "TokenRows":
        """Return the leading rows of `rows` that have one token and sample a token, as columns."""
        first = list(takewhile(lambda row: len(row.token_ids) == 1 and row.draw is not None, rows))
        page_counts = np.array([len(row.page_ids) for row in first], dtype=np.int32)
        table = np.zeros((len(first), page_counts.max(initial=0)), dtype=np.int32)
        for into, row in zip(table, first, strict=True):
            into[: len(row.page_ids)] = row.page_ids
        starts = np.array([row.start for row in first], dtype=np.int64)
        columns = RowColumns(
            np.array([row.token_ids[0] for row in first], dtype=np.int64),
            starts,
            0,
            np.array([FROM_HOST if row.source is None else row.source for row in first], dtype=np.int32),
            np.arange(len(first)),
            table,
            page_counts,
            np.array([row.adapter for row in first], dtype=np.int32),
            int(starts.max(initial=-1)) + 1,
            SamplingMetadata.of([row.draw for row in first if row.draw is not None]),
        )
        return cls(len(first), int(starts.sum()) + len(first), lambda: columns)

    @property
    def columns(self) -> RowColumns:
        """The rows as arrays, which are built at the first access."""
        if self._columns is None:
            self._columns = self._make()
        return self._columns

    @property
    def newest(self) -> "TokenRows":
        """The rows with the newest token of each request; the other rows verify draft tokens."""
        return self

    def __len__(self) -> int:
        return self._rows

    def __iter__(self) -> Iterator[StepRow]:
        return map(self._row, range(self._rows))

    @overload
    def __getitem__(self, at: int) -> StepRow: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[StepRow]: ...
    def __getitem__(self, at: int | slice) -> StepRow | Sequence[StepRow]:
        return list(self)[at] if isinstance(at, slice) else self._row(range(self._rows)[at])

    def _row(self, at: int) -> StepRow:
        columns = self.columns
        source, slot = int(columns.sources[at]), columns.slot_indices[at]
        return StepRow(
            (int(columns.token_ids[at]),),
            int(columns.position_offset[at]) + columns.step,
            columns.table[slot, : columns.page_counts[slot]].tolist(),
            columns.draws[at],
            None if source == FROM_HOST else source,
            adapter=int(columns.adapters[slot]),
        )


class StepBatch:
    """The rows of one step, at least one. No two rows may write the same position of a page.

    The rows of `tokens` come first, followed by `chunks`, which may have any length.
    """

    __slots__ = ("chunks", "tokens")

    def __init__(self, rows: Sequence[StepRow], tokens: TokenRows | None = None) -> None:
        """Create a batch of `tokens` followed by `rows`.

        If `tokens` is None, the leading `rows` that have one token and sample a token are stored as columns.
        """
        self.tokens = TokenRows.of(rows) if tokens is None else tokens
        self.chunks = rows[len(self.tokens) :] if tokens is None else rows

    def __len__(self) -> int:
        return len(self.tokens) + len(self.chunks)

    @property
    def verifies(self) -> bool:
        """True if any row verifies a draft token."""
        return self.tokens.newest is not self.tokens

    @property
    def scored(self) -> bool:
        """True if the prompt of any row is scored."""
        return any(row.scores is not None for row in self.chunks)

    @property
    def scored_tokens(self) -> int:
        """The number of tokens in the rows whose prompts are scored."""
        return sum(len(row.token_ids) for row in self.chunks if row.scores is not None)

    @property
    def rows(self) -> Sequence[StepRow]:
        """All rows as objects, which are created at each access."""
        return [*self.tokens, *self.chunks]

    @property
    def draws(self) -> SamplingMetadata:
        """The sampling inputs of all rows that sample a token, in row order."""
        draws = self.tokens.columns.draws
        return draws.followed_by([row.draw for row in self.chunks if row.draw is not None]) if self.chunks else draws


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """The result of a step: the sampled token id of each row, None for rows that sample no token.

    `logprobs` has one entry for each row, None for a row without log probabilities; it is empty if no row has log
    probabilities.
    """

    token_ids: Sequence[int | None]
    logprobs: Sequence[TokenLogprobs | None] = ()

    def split(self, rows: int) -> tuple["ModelRunnerOutput", "ModelRunnerOutput"]:
        """Return the output of the first `rows` rows, and the output of the other rows."""
        if rows == len(self.token_ids):
            return self, NO_OUTPUT
        first, others = slice(rows), slice(rows, None)
        return (
            ModelRunnerOutput(self.token_ids[first], self.logprobs[first]),
            ModelRunnerOutput(self.token_ids[others], self.logprobs[others]),
        )


NO_OUTPUT = ModelRunnerOutput(())


class PendingStep:
    """A launched step, called once: the call waits for the step, and returns its result or raises the device's error.

    A step with grammars is launched before the host knows the previous step's tokens, on which its grammar masks
    depend. Only its forward pass is launched then, and `draw` launches its sampling.
    """

    def __init__(self, read: Callable[[], ModelRunnerOutput], draw: Callable[[], None] | None = None) -> None:
        """Create a step. `read` waits for the result; `draw` launches the sampling, None = it is launched already."""
        self._read = read
        self._draw = draw

    def draw(self) -> None:
        """Launch the sampling, unless it is launched; the histories must have the previous step's tokens."""
        draw, self._draw = self._draw, None
        if draw is not None:
            draw()

    def __call__(self) -> ModelRunnerOutput:
        """Return the result; the sampling is launched first if it is not yet."""
        self.draw()
        return self._read()


def rows_of(drawn: Sequence[int], batch: StepBatch, logprobs: Sequence[TokenLogprobs | None] = ()) -> ModelRunnerOutput:
    """Return the output of a step, with one entry for each row of `batch`.

    `drawn` has the sampled tokens of only the rows that sample one, in row order. `logprobs` has one entry for each of
    these tokens, or is empty if no row has log probabilities.
    """
    if not batch.chunks:
        return ModelRunnerOutput(drawn, logprobs)
    singles = len(batch.tokens)
    return ModelRunnerOutput(
        [*drawn[:singles], *_at_their_rows(drawn[singles:], batch.chunks)],
        [*logprobs[:singles], *_at_their_rows(logprobs[singles:], batch.chunks)] if logprobs else (),
    )


def _at_their_rows(drawn: Sequence[_Drawn], chunks: Sequence[StepRow]) -> list[_Drawn | None]:
    remaining = iter(drawn)
    return [None if row.draw is None else next(remaining) for row in chunks]
