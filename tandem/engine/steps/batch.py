"""The work of the engine in one step: rows of tokens, each row a piece of one request.

Rows of one token each are columns that read as objects: a decode step of hundreds of rows is made, packed and sampled
in a few operations on arrays, and an object for each row would take longer than a small model's step.

A decode row is a piece of one token, a prefill row a chunk of the prompt; the engine tells them apart by length only.
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
"""The source of a row whose token is known."""


class StepRow(NamedTuple):
    """A piece of one request.

    `token_ids` take the positions `start`, `start + 1`, …; the KV of positions 0..start-1 is already in `page_ids`,
    which also have room for the new ones. Page n of group g (`tandem/engine/config/kv.py`) is entry n · groups + g and
    holds positions n · page_tokens ..; entries of pages that no token of the row sees mean nothing. Pages stay the
    caller's. `draw` is None for every chunk of a prompt but the last.

    `scores` takes the log probabilities of the row's tokens, if its prompt is scored.

    With a `source` the row's only token is the one that row number `source` of the step launched just before draws,
    which may still be running; the id in `token_ids` then means nothing. `adapter` counts from 1, 0 = the base model.
    """

    token_ids: Sequence[int]
    start: int
    page_ids: Sequence[int]
    draw: SamplingInput | None
    source: int | None = None
    scores: PromptScores | None = None
    adapter: int = 0


class RowColumns(NamedTuple):
    """n rows of one token each, which all draw.

    Their pages are good until the next step is planned, nothing else of them changes.
    """

    token_ids: NDArray[np.int64]
    """[n]"""
    position_offset: NDArray[np.int64]
    """[n]: positions of the tokens, less `step`."""
    step: int
    sources: NDArray[np.int32]
    """[n], FROM_HOST for rows without."""
    slot_indices: NDArray[np.intp]
    """[n]: each row's slot in `table`, `page_counts` and `adapters`."""
    table: NDArray[np.int32]
    """[slots, at least max(page_counts)]: pages as in `StepRow`; entries behind a slot's last one mean nothing."""
    page_counts: NDArray[np.int32]
    """[slots]: the number of entries of each slot."""
    adapters: NDArray[np.int32]
    """[slots], as in `StepRow`."""
    longest: int
    """Tokens that the row of most context attends to, itself included; 0 without rows."""
    draws: SamplingMetadata


class TokenRows(Sequence[StepRow]):
    """n rows of one token each.

    Their columns are made when they are first asked for, before the next step is planned: a simulation makes none.
    """

    __slots__ = ("_columns", "_make", "_rows", "context_tokens")

    def __init__(self, rows: int, context_tokens: int, make: Callable[[], RowColumns]) -> None:
        """`context_tokens`: that all rows attend to, themselves included."""
        self._rows = rows
        self.context_tokens = context_tokens
        self._make = make
        self._columns: RowColumns | None = None

    @classmethod
    def of(cls, rows: Sequence[StepRow]) -> "TokenRows":
        """Return the leading rows that have one token and draw, up to the first that does not."""
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
        """The rows of the newest token of each request: all but those that verify drafts."""
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
    """The rows of one step, at least one; no position of a page is written by two rows.

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
    def scored(self) -> bool:
        """True if the prompt of any row is scored."""
        return any(row.scores is not None for row in self.chunks)

    @property
    def scored_tokens(self) -> int:
        """The tokens of rows whose prompts are scored."""
        return sum(len(row.token_ids) for row in self.chunks if row.scores is not None)

    @property
    def rows(self) -> Sequence[StepRow]:
        """All of them as objects, made anew each time."""
        return [*self.tokens, *self.chunks]

    @property
    def draws(self) -> SamplingMetadata:
        """The draws of all rows that have one, in their order."""
        draws = self.tokens.columns.draws
        return draws.followed_by([row.draw for row in self.chunks if row.draw is not None]) if self.chunks else draws


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """The sampled token id of each row of a step, None for rows that sample none.

    `logprobs` has one entry for each row, None without log probabilities; it is empty if no row has any.
    """

    token_ids: Sequence[int | None]
    logprobs: Sequence[TokenLogprobs | None] = ()

    def split(self, rows: int) -> tuple["ModelRunnerOutput", "ModelRunnerOutput"]:
        """Return the output of the first `rows` rows, and that of the others."""
        if rows == len(self.token_ids):
            return self, NO_OUTPUT
        first, others = slice(rows), slice(rows, None)
        return (
            ModelRunnerOutput(self.token_ids[first], self.logprobs[first]),
            ModelRunnerOutput(self.token_ids[others], self.logprobs[others]),
        )


NO_OUTPUT = ModelRunnerOutput(())

PendingStep = Callable[[], ModelRunnerOutput]
"""A step that was launched: called once, waits for its result. Raises what the device reports."""


def rows_of(drawn: Sequence[int], batch: StepBatch, logprobs: Sequence[TokenLogprobs | None] = ()) -> ModelRunnerOutput:
    """The tokens of the rows with a draw, in their order, each put at its row; their log probabilities if any asked."""
    if not batch.chunks:
        return ModelRunnerOutput(drawn, logprobs)
    singles = len(batch.tokens)
    return ModelRunnerOutput(
        [*drawn[:singles], *_at_their_rows(drawn[singles:], batch.chunks)],
        [*logprobs[:singles], *_at_their_rows(logprobs[singles:], batch.chunks)] if logprobs else (),
    )


def _at_their_rows(drawn: Sequence[_Drawn], chunks: Sequence[StepRow]) -> list[_Drawn | None]:
    each = iter(drawn)
    return [None if row.draw is None else next(each) for row in chunks]
