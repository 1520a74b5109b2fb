"""The composition of the batch in steps with the same requests, and what such steps bring once they have completed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import overload

import numpy as np
from numpy.typing import NDArray

from decode_worker.batch_slots import BatchSlot, SlotColumns, SlotIndices
from decode_worker.request import DecodeRequest
from engine.steps.batch import FROM_HOST, RowColumns
from engine.steps.draws import Draws, History, all_greedy
from wire.messages import RoutedEvent, RoutedTokens, SamplingParams, StepTokens


@dataclass(frozen=True, slots=True)
class _Drawing:
    """How the rows draw, as far as it is the same in each step."""

    samplings: Sequence[SamplingParams]
    histories: Sequence[History | None]
    settings: NDArray[np.float64]
    seeds: NDArray[np.uint64]
    draw_offset: NDArray[np.int64]
    """Index of each row's draw, less the number of the step."""
    greedy: bool
    penalized: bool
    wants_logprobs: bool
    may_end_from: int
    """The first step in which the answer of each row is as long as its `min_tokens`."""


@dataclass(frozen=True, slots=True)
class _Owners:
    """Whose the rows are."""

    request_ids: list[str]
    attempts: list[int]
    answer_offset: NDArray[np.int64]
    """Index of each row's token in its answer, less the number of the step."""
    rows: dict[str, list[int]]
    """The rows of each router; empty if there is only one router."""
    router: str
    """The router of the first row."""


class BatchSnapshot:
    """The requests that go through steps together, row by row. It is valid for every step until somebody joins, leaves
    or misses a step.

    What is derived from the columns is copied when it is first asked for: what drawing needs before the next step is
    launched, what the routers need when a step completes. All requests are still in their slots then.
    """

    def __init__(self, columns: SlotColumns, indices: SlotIndices) -> None:
        """`indices` [n >= 1] are the slots of the rows."""
        self._columns = columns
        self.indices = indices
        self.slots: list[BatchSlot] = columns.slots[indices].tolist()
        offset = self._position_offset = columns.position_offset[indices]
        self._offset_sum = int(offset.sum())
        self._longest = int(offset.max()) + 1

    def __len__(self) -> int:
        return len(self.slots)

    def context_tokens(self, step: int) -> int:
        """Tokens that the rows of this step attend to, themselves included: Σ (position_offset + step + 1)."""
        return self._offset_sum + len(self.slots) * (step + 1)

    @cached_property
    def first_end(self) -> int:
        """The first step that is the last one of any request."""
        return min(slot.last_step for slot in self.slots)

    def rows(self, step: int, before: "BatchSnapshot | None") -> RowColumns:
        """The rows of this step; `before` is the snapshot of the step just before it, if that is in flight."""
        columns, indices, drawing = self._columns, self.indices, self._drawing
        return RowColumns(
            self._in_flight_tokens if before is self else columns.newest_token[indices],
            self._position_offset,
            step,
            self._sources(before),
            indices,
            columns.page_table,
            columns.page_count,
            self._longest + step,
            Draws(
                drawing.samplings,
                drawing.histories,
                drawing.settings,
                drawing.seeds,
                drawing.draw_offset + step,
                drawing.greedy,
                drawing.penalized,
                drawing.wants_logprobs,
                step < drawing.may_end_from,
            ),
        )

    def answer_index(self, row: int, step: int) -> int:
        """Index, in its answer, of the token that a row of this step brings."""
        return int(self._position_offset[row]) + step + 1 - self.slots[row].request.prompt_tokens

    def tokens(self, step: int, token_ids: Sequence[int], without: set[int]) -> list[RoutedTokens]:
        """The tokens of this step, one for each row but those in `without`, by router."""
        owners = self._owners
        everything = StepTokens(owners.request_ids, owners.attempts, (owners.answer_offset + step).tolist(), token_ids)
        if not owners.rows:
            left = _without_rows(everything, without) if without else everything
            return [RoutedTokens(owners.router, left)] if len(left) else []
        found = []
        for router, rows in owners.rows.items():
            kept = [row for row in rows if row not in without] if without else rows
            if kept:
                found.append(RoutedTokens(router, _only_rows(everything, kept)))
        return found

    def _sources(self, before: "BatchSnapshot | None") -> NDArray[np.int32]:
        """For each row [n], the row of the step before that draws its token."""
        if before is self:
            return self._row_numbers
        rows = np.full(len(self._columns), FROM_HOST, dtype=np.int32)
        if before is not None:
            rows[before.indices] = before._row_numbers
        return rows[self.indices]

    @cached_property
    def _row_numbers(self) -> NDArray[np.int32]:
        return np.arange(len(self), dtype=np.int32)

    @cached_property
    def _in_flight_tokens(self) -> NDArray[np.int64]:
        """Placeholders for tokens that have not arrived."""
        return np.zeros(len(self), dtype=np.int64)

    @cached_property
    def _drawing(self) -> _Drawing:
        columns, indices = self._columns, self.indices
        settings, samplings = columns.settings[indices], columns.samplings[indices].tolist()
        offset = columns.draw_offset[indices] + self._position_offset
        return _Drawing(
            samplings,
            columns.histories[indices].tolist(),
            settings,
            columns.seeds[indices],
            offset,
            all_greedy(settings),
            bool(columns.penalized[indices].any()),
            bool(columns.wants_logprobs[indices].any()),
            int((columns.min_tokens[indices] - offset).max()),
        )

    @cached_property
    def _owners(self) -> _Owners:
        columns, indices = self._columns, self.indices
        routers = columns.routers[indices].tolist()
        rows: dict[str, list[int]] = {}
        for row, router in enumerate(routers if len(set(routers)) > 1 else ()):
            rows.setdefault(router, []).append(row)
        return _Owners(
            columns.request_ids[indices].tolist(),
            columns.attempts[indices].tolist(),
            columns.answer_offset[indices] + self._position_offset,
            rows,
            routers[0],
        )


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """A step whose tokens have arrived. It must be read before the next step is planned."""

    step: int
    snapshot: BatchSnapshot
    token_ids: Sequence[int]
    special: Sequence[int]
    """Rows that need an event: their token may be the last one, or there is more to tell than a token. Ascending."""
    silent: set[int]
    """These, and the rows of requests that were over before."""

    def token(self, row: int) -> tuple[DecodeRequest, int, int]:
        """The request of a row, the index of its token in the answer, and the token."""
        snapshot = self.snapshot
        return snapshot.slots[row].request, snapshot.answer_index(row, self.step), self.token_ids[row]

    def plain_tokens(self) -> list[RoutedTokens]:
        """The tokens of all rows that are not `silent`, by router."""
        return self.snapshot.tokens(self.step, self.token_ids, self.silent)


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput(Sequence[RoutedEvent]):
    """What a step brought for the routers; it names a request at most once. As a sequence it is all of that as events,
    made anew each time.
    """

    events: Sequence[RoutedEvent] = ()
    completed: CompletedStep | None = None
    """The step that has the tokens of all requests without an event."""

    @property
    def tokens(self) -> Sequence[RoutedTokens]:
        """Tokens of requests without an event, by router, made anew each time. They must be asked for before the next
        step is planned.
        """
        return () if self.completed is None else self.completed.plain_tokens()

    def __len__(self) -> int:
        return sum(len(each.tokens) for each in self.tokens) + len(self.events)

    def __iter__(self) -> Iterator[RoutedEvent]:
        plain = (RoutedEvent(each.router_id, event) for each in self.tokens for event in each.tokens.events())
        return chain(self.events, plain)

    @overload
    def __getitem__(self, at: int) -> RoutedEvent: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[RoutedEvent]: ...
    def __getitem__(self, at: int | slice) -> RoutedEvent | Sequence[RoutedEvent]:
        return list(self)[at]


NO_OUTPUT = StepOutput()


def _without_rows(tokens: StepTokens, rows: set[int]) -> StepTokens:
    """All rows but a few."""
    names, attempts = list(tokens.request_ids), list(tokens.attempts)
    indices, token_ids = list(tokens.indices), list(tokens.token_ids)
    for row in sorted(rows, reverse=True):
        del names[row], attempts[row], indices[row], token_ids[row]
    return StepTokens(names, attempts, indices, token_ids)


def _only_rows(tokens: StepTokens, rows: Sequence[int]) -> StepTokens:
    """Some of the rows."""
    return StepTokens(
        [tokens.request_ids[row] for row in rows],
        [tokens.attempts[row] for row in rows],
        [tokens.indices[row] for row in rows],
        [tokens.token_ids[row] for row in rows],
    )
