"""Requests that go through steps together, row by row, and what they are as long as they do."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from decode_worker.columns import Columns, Places
from decode_worker.seat import Seat
from engine.draws import Draws, History, all_greedy
from engine.token_rows import FROM_HOST, RowColumns
from wire.messages import RoutedTokens, SamplingParams, StepTokens


@dataclass(frozen=True, slots=True)
class _Drawing:
    """How the rows draw: what is alike in each launch."""

    samplings: Sequence[SamplingParams]
    histories: Sequence[History | None]
    settings: NDArray[np.float64]
    seeds: NDArray[np.uint64]
    shift: NDArray[np.int64]
    greedy: bool
    penalized: bool
    scored: bool


@dataclass(frozen=True, slots=True)
class _Naming:
    """Whose the rows are."""

    request_ids: list[str]
    attempts: list[int]
    index_shift: NDArray[np.int64]
    rows: dict[str, list[int]]
    """By router; empty if there is but one."""
    router: str
    """Of the first row."""


class Cohort:
    """Parts are copied from the columns when they are asked for, which is while all of it are seated: before the next
    launch what drawing needs, when a step lands what news need.
    """

    def __init__(self, columns: Columns, places: Places) -> None:
        """`places` [n >= 1]"""
        self._columns = columns
        self.places = places
        self.seats: list[Seat] = columns.seats[places].tolist()
        shift = self._shift = columns.shift[places]
        self._shift_sum = int(shift.sum())
        self._longest = int(shift.max()) + 1

    def __len__(self) -> int:
        return len(self.seats)

    def context_tokens(self, number: int) -> int:
        """That the rows of this launch attend to, themselves included."""
        return self._shift_sum + len(self.seats) * (number + 1)

    @cached_property
    def first_end(self) -> int:
        """The first launch that is anybody's last."""
        return min(seat.last for seat in self.seats)

    def rows(self, number: int, before: "Cohort | None") -> RowColumns:
        """Of this launch; `before`: the cohort of the one just before it, if that is in flight."""
        columns, places = self._columns, self.places
        drawing = self._drawing
        return RowColumns(
            self._on_their_way if before is self else columns.newest[places],
            self._shift,
            number,
            self._sources(before),
            places,
            columns.table,
            columns.held,
            self._longest + number,
            Draws(
                drawing.samplings,
                drawing.histories,
                drawing.settings,
                drawing.seeds,
                drawing.shift + number,
                drawing.greedy,
                drawing.penalized,
                drawing.scored,
            ),
        )

    def index(self, row: int, number: int) -> int:
        """Number, in its answer, of the token that a row of this launch brings."""
        return int(self._shift[row]) + number + 1 - self.seats[row].request.prompt_tokens

    def tokens(self, number: int, token_ids: Sequence[int], without: set[int]) -> list[RoutedTokens]:
        """What this launch has drawn, one a row, by router, but for the rows `without`."""
        named = self._naming
        whole = StepTokens(named.request_ids, named.attempts, (named.index_shift + number).tolist(), token_ids)
        if not named.rows:
            left = _dropping(whole, without) if without else whole
            return [RoutedTokens(named.router, left)] if len(left) else []
        found = []
        for router, rows in named.rows.items():
            mine = [row for row in rows if row not in without] if without else rows
            if mine:
                found.append(RoutedTokens(router, _keeping(whole, mine)))
        return found

    def _sources(self, before: "Cohort | None") -> NDArray[np.int32]:
        """[n]"""
        if before is self:
            return self._own_rows
        rows = np.full(len(self._columns), FROM_HOST, dtype=np.int32)
        if before is not None:
            rows[before.places] = before._own_rows
        return rows[self.places]

    @cached_property
    def _own_rows(self) -> NDArray[np.int32]:
        return np.arange(len(self), dtype=np.int32)

    @cached_property
    def _on_their_way(self) -> NDArray[np.int64]:
        """In place of tokens that are not here yet."""
        return np.zeros(len(self), dtype=np.int64)

    @cached_property
    def _drawing(self) -> _Drawing:
        columns, places = self._columns, self.places
        settings, samplings = columns.settings[places], columns.samplings[places].tolist()
        return _Drawing(
            samplings,
            columns.histories[places].tolist(),
            settings,
            columns.seeds[places],
            columns.draw[places] + self._shift,
            all_greedy(settings),
            bool(columns.penalized[places].any()),
            bool(columns.scored[places].any()),
        )

    @cached_property
    def _naming(self) -> _Naming:
        columns, places = self._columns, self.places
        routers = columns.routers[places].tolist()
        alone = len(set(routers)) == 1
        rows: dict[str, list[int]] = {}
        for row, router in enumerate(() if alone else routers):
            rows.setdefault(router, []).append(row)
        return _Naming(
            columns.request_ids[places].tolist(),
            columns.attempts[places].tolist(),
            columns.index[places] + self._shift,
            rows,
            routers[0],
        )


def _dropping(tokens: StepTokens, rows: set[int]) -> StepTokens:
    """All but a few rows."""
    names, attempts = list(tokens.request_ids), list(tokens.attempts)
    indices, token_ids = list(tokens.indices), list(tokens.token_ids)
    for row in sorted(rows, reverse=True):
        del names[row], attempts[row], indices[row], token_ids[row]
    return StepTokens(names, attempts, indices, token_ids)


def _keeping(tokens: StepTokens, rows: Sequence[int]) -> StepTokens:
    """Some rows."""
    return StepTokens(
        [tokens.request_ids[row] for row in rows],
        [tokens.attempts[row] for row in rows],
        [tokens.indices[row] for row in rows],
        [tokens.token_ids[row] for row in rows],
    )
