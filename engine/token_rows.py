"""Rows of a step: one as an object, many of one token each as columns that read as such objects.

A decode step of hundreds of rows is made, packed and sampled in a few operations on arrays; to make an object for each
of its rows would take longer than a small model's step.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from engine.draws import Draw, Draws

FROM_HOST = -1
"""The source of a row whose token is known."""


class StepRow(NamedTuple):
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


class RowColumns(NamedTuple):
    """n rows of one token each, which all draw. Their pages are good until the next step is planned, nothing else of
    them changes.
    """

    token_ids: NDArray[np.int64]
    """[n]"""
    shift: NDArray[np.int64]
    """[n]: positions of the tokens, less `number`."""
    number: int
    sources: NDArray[np.int32]
    """[n], FROM_HOST for rows without."""
    places: NDArray[np.intp]
    """[n]: where each row's pages are."""
    table: NDArray[np.int32]
    """[places, at least max(held)]: pages, anything behind the last of them."""
    held: NDArray[np.int32]
    """[places]: how many pages there are."""
    longest: int
    """Tokens that the row of most context attends to, itself included; 0 without rows."""
    draws: Draws


class TokenRows(Sequence[StepRow]):
    """n rows of one token each. Their columns are made when they are first asked for, before anything of the next step
    is planned: who only counts rows, as a simulation does, pays for none.
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
        """Those of `rows` before the first that has more tokens or draws none."""
        first = list(takewhile(lambda row: len(row.token_ids) == 1 and row.draw is not None, rows))
        held = np.array([len(row.page_ids) for row in first], dtype=np.int32)
        table = np.zeros((len(first), held.max(initial=0)), dtype=np.int32)
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
            held,
            int(starts.max(initial=-1)) + 1,
            Draws.of([row.draw for row in first if row.draw is not None]),
        )
        return cls(len(first), int(starts.sum()) + len(first), lambda: columns)

    @property
    def columns(self) -> RowColumns:
        if self._columns is None:
            self._columns = self._make()
        return self._columns

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
        source, place = int(columns.sources[at]), columns.places[at]
        return StepRow(
            (int(columns.token_ids[at]),),
            int(columns.shift[at]) + columns.number,
            columns.table[place, : columns.held[place]].tolist(),
            columns.draws[at],
            None if source == FROM_HOST else source,
        )
