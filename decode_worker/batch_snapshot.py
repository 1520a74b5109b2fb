"""Snapshots of the running batch for consecutive steps with the same requests, and the tokens of completed steps.

A snapshot is made once and used for every step until the batch changes, so a step copies almost no data.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from decode_worker.batch_slots import BatchSlot, SlotColumns, SlotIndices
from decode_worker.request import DecodeRequest
from tandem.engine.steps.batch import FROM_HOST, RowColumns
from tandem.engine.steps.sampling_metadata import History, SamplingMetadata, all_greedy
from tandem.protocol.messages import RoutedEvent, RoutedTokens, SamplingParams, StepTokens

BUFFERED_STEPS = 64
"""The number of steps whose tokens are buffered before they are appended to the answers."""


class _Drawing(NamedTuple):
    """The part of the sampling input that is constant over the steps of a snapshot."""

    samplings: Sequence[SamplingParams]
    histories: Sequence[History | None]
    settings: NDArray[np.float64]
    seeds: NDArray[np.uint64]
    draw_offset: NDArray[np.int64]
    """[n]: in step k, the row uses random number `draw_offset` + k of its request's random sequence."""
    greedy: bool
    """True if every row samples greedily."""
    looks_back: bool
    """True if any row has penalties or a grammar."""
    wants_logprobs: bool
    masked_tokens: NDArray[np.int64]
    """[n]: the number of leading answer tokens whose logits are changed by biases or a minimum length."""
    unmasked_from: int
    """The first step in which no row's logits are changed: every answer then has at least `masked_tokens` tokens."""

    def moved(self, by: NDArray[np.int64]) -> "_Drawing":
        """Return the sampling input after row i has moved forward by `by`[i] positions."""
        offset = self.draw_offset + by
        return self._replace(draw_offset=offset, unmasked_from=int((self.masked_tokens - offset).max()))


class _Owners(NamedTuple):
    """The requests that the rows belong to, and their routers."""

    request_ids: list[str]
    attempts: list[int]
    answer_offset: NDArray[np.int64]
    """[n]: in step k, the row samples the answer token with index `answer_offset` + k."""
    masks: dict[str, bytearray]
    """For each router, a mask [n] of its rows: a byte is 1 if the row's request came from this router, else 0.

    Empty if all rows belong to one router.
    """
    router: str
    """The router of the first row."""


class BatchSnapshot:
    """The requests that have a row in the same steps, in row order.

    A snapshot is valid for every step until a request joins, leaves or skips a step. Made by the running batch.

    Derived data is copied from the columns when it is first needed: the sampling input before the next step is
    launched, the owners when a step completes. At both times all requests still have their slots.
    """

    def __init__(self, columns: SlotColumns, indices: SlotIndices) -> None:
        """Create the snapshot; `indices` [n >= 1] are the slots of the rows."""
        self._columns = columns
        self.indices = indices
        self.slots: list[BatchSlot] = columns.slots[indices].tolist()
        self._place(columns.position_offset[indices])

    def _place(self, offset: NDArray[np.int64]) -> None:
        self._position_offset, self._offset_sum, self._longest = offset, int(offset.sum()), int(offset.max()) + 1

    def moved(self) -> "BatchSnapshot":
        """Return a snapshot of the same requests at their new positions. This is cheaper than creating a new one."""
        offset = self._columns.position_offset[self.indices]
        by, moved = offset - self._position_offset, object.__new__(BatchSnapshot)
        moved.__dict__.update(self.__dict__, _drawing=self._drawing.moved(by))
        moved.__dict__["owners"] = self.owners._replace(answer_offset=self.owners.answer_offset + by)
        moved._place(offset)
        return moved

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.slots)

    def context_tokens(self, step: int) -> int:
        """Return the number of tokens that the rows of `step` attend to, summed: Σ (position_offset + step + 1)."""
        return self._offset_sum + len(self.slots) * (step + 1)

    def rows(self, step: int, before: "BatchSnapshot | None") -> RowColumns:
        """Return the rows of `step`; `before` is the previous step's snapshot if that step is in flight, else None."""
        columns, indices, drawing = self._columns, self.indices, self._drawing
        return RowColumns(
            self._in_flight_tokens if before is self else columns.newest_token[indices],
            self._position_offset,
            step,
            self._sources(before),
            indices,
            columns.page_table,
            columns.page_count,
            columns.adapters,
            self._longest + step,
            SamplingMetadata(
                drawing.samplings,
                drawing.histories,
                drawing.settings,
                drawing.seeds,
                drawing.draw_offset + step,
                drawing.greedy,
                drawing.looks_back,
                drawing.wants_logprobs,
                step < drawing.unmasked_from,
            ),
        )

    def answer_index(self, row: int, step: int) -> int:
        """Return the answer index of the token that a row samples in step `step`."""
        return int(self._position_offset[row]) + step + 1 - self.slots[row].request.prompt_tokens

    def tokens(self, step: int, token_ids: Sequence[int], without: set[int]) -> list[RoutedTokens]:
        """Return the tokens of the rows of step `step`, except the rows in `without`, grouped by router.

        `token_ids` has one token for each row.
        """
        owners = self.owners
        everything = StepTokens(owners.request_ids, owners.attempts, (owners.answer_offset + step).tolist(), token_ids)
        if not owners.masks and not without:
            return [RoutedTokens(owners.router, everything)]
        routed = []
        for router, mask in (owners.masks or {owners.router: bytearray(b"\1") * len(self)}).items():
            keep = bytearray(mask)
            for row in without:
                keep[row] = 0
            if any(keep):
                routed.append(RoutedTokens(router, _select_rows(everything, keep)))
        return routed

    def _sources(self, before: "BatchSnapshot | None") -> NDArray[np.int32]:
        """Return for each row [n] the row of the previous step that samples its input token, or FROM_HOST.

        `before` is the previous step's snapshot if that step is in flight, else None.
        """
        if before is self:
            return self._row_numbers
        if before is None:
            return np.full(len(self), FROM_HOST, dtype=np.int32)
        rows = np.full(len(self._columns), FROM_HOST, dtype=np.int32)
        rows[before.indices] = before._row_numbers
        return rows[self.indices]

    @cached_property
    def _row_numbers(self) -> NDArray[np.int32]:
        return np.arange(len(self), dtype=np.int32)

    @cached_property
    def _in_flight_tokens(self) -> NDArray[np.int64]:
        """Zeros in place of the input tokens in flight; the engine takes the tokens from the step that samples them."""
        return np.zeros(len(self), dtype=np.int64)

    @cached_property
    def _drawing(self) -> _Drawing:
        columns, indices = self._columns, self.indices
        settings, samplings = columns.settings[indices], columns.samplings[indices].tolist()
        offset, masked_tokens = columns.draw_offset[indices] + self._position_offset, columns.masked_tokens[indices]
        return _Drawing(
            samplings,
            columns.histories[indices].tolist(),
            settings,
            columns.seeds[indices],
            offset,
            all_greedy(settings),
            bool(columns.looks_back[indices].any()),
            bool(columns.wants_logprobs[indices].any()),
            masked_tokens,
            int((masked_tokens - offset).max()),
        )

    @cached_property
    def owners(self) -> _Owners:
        """The requests and routers of the rows. Must be read before the slot of any row is given to another request."""
        columns, indices = self._columns, self.indices
        routers = columns.routers[indices].tolist()
        masks: dict[str, bytearray] = {}
        for row, router in enumerate(routers if len(set(routers)) > 1 else ()):
            masks.setdefault(router, bytearray(len(routers)))[row] = 1
        return _Owners(
            columns.request_ids[indices].tolist(),
            columns.attempts[indices].tolist(),
            columns.answer_offset[indices] + self._position_offset,
            masks,
            routers[0],
        )


@dataclass(frozen=True, slots=True)
class DecodedStep:
    """The decode rows of a completed step, with the token that each row sampled.

    Made by the running batch when the tokens of a step arrive.
    """

    step: int
    snapshot: BatchSnapshot
    token_ids: Sequence[int]
    event_rows: Sequence[int]
    """Rows that need an event, ascending: their token may be the last of the answer, or carries more than its id."""
    excluded_rows: set[int]
    """Rows that `plain_tokens` leaves out: those that need an event, and those of requests that had already ended."""
    events: list[RoutedEvent] = field(default_factory=list)
    """The events of `event_rows`; added by the decode scheduler."""

    def tokens(self, row: int) -> tuple[DecodeRequest, int, Sequence[int]]:
        """Return a row's request, the answer index of the first token that it gained in this step, and these tokens."""
        snapshot = self.snapshot
        return snapshot.slots[row].request, snapshot.answer_index(row, self.step), (self.token_ids[row],)

    def rows_of(self, row: int) -> Sequence[int]:
        """Return the rows of this step that sampled the tokens of the request in row `row`."""
        return (row,)

    def plain_tokens(self) -> list[RoutedTokens]:
        """Return the tokens of all rows that are not in `excluded_rows`, grouped by router."""
        return self.snapshot.tokens(self.step, self.token_ids, self.excluded_rows)


class TokenBuffer:
    """Buffers tokens that have arrived until they are appended to their answers, by step and slot.

    Appending to hundreds of lists in each step would take longer than all other processing of the step's tokens. A
    request's answer is complete after `flush` of its slot. Owned by the running batch.
    """

    def __init__(self) -> None:
        self.completed_steps = 0
        """The number of steps whose tokens have arrived."""
        self._tokens = np.zeros((BUFFERED_STEPS, 0), dtype=np.int64)

    def grow(self, more: int) -> None:
        """Add `more` slots."""
        self._tokens = np.concatenate((self._tokens, np.zeros((BUFFERED_STEPS, more), dtype=np.int64)), axis=1)

    def store(
        self, step: int, indices: SlotIndices, tokens: NDArray[np.int64], all_slots: Collection[BatchSlot]
    ) -> None:
        """Store the tokens of a completed step, one for each of the slots `indices`.

        If the buffer is full then, the tokens of `all_slots` are appended to their answers.
        """
        self._tokens[step % BUFFERED_STEPS, indices] = tokens
        self.completed_steps = step + 1
        if not self.completed_steps % BUFFERED_STEPS:
            self._flush_all(all_slots)

    def flush(self, slot: BatchSlot) -> None:
        """Append the buffered tokens of a request to its answer."""
        end = min(self.completed_steps, slot.last_step + 1)
        if not slot.dropped and slot.buffered_from < end:
            # The buffer is reused every BUFFERED_STEPS steps; `first` is the step that is stored in its row 0.
            first = self.completed_steps - 1 - (self.completed_steps - 1) % BUFFERED_STEPS
            tokens = self._tokens[slot.buffered_from - first : end - first, slot.index].tolist()
            if slot.skipped_steps:
                numbered = enumerate(tokens, slot.buffered_from)
                tokens = [token for step, token in numbered if step not in slot.skipped_steps]
            slot.request.answer.extend(tokens)
            slot.buffered_from = end

    def _flush_all(self, slots: Collection[BatchSlot]) -> None:
        """Append all buffered tokens to their answers, before the buffer is reused.

        Flushing all slots at once takes a fraction of the time of flushing them one by one.
        """
        columns, end = self._tokens.T.tolist(), self.completed_steps
        for slot in slots:
            if slot.skipped_steps or slot.dropped or slot.last_step < end - 1:
                self.flush(slot)
            elif slot.buffered_from < end:
                slot.request.answer.extend(columns[slot.index][slot.buffered_from - end :])
                slot.buffered_from = end


def _select_rows(tokens: StepTokens, keep: Sequence[int]) -> StepTokens:
    """Return the entries of `tokens` for the rows whose entry in `keep` [n] is not 0."""
    return StepTokens(
        list(compress(tokens.request_ids, keep)),
        list(compress(tokens.attempts, keep)),
        list(compress(tokens.indices, keep)),
        list(compress(tokens.token_ids, keep)),
    )
