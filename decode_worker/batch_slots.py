"""The slots of the running batch: which steps have a row of a request, its columns, and tokens its answer lacks yet.

Steps are numbered from 0 as they are launched. A request that has a row in each step from `first_step` to `last_step`
is described by constants: its row of step n has position `position_offset` + n. So nothing about it changes from step
to step, and a step of hundreds of rows is a few operations on columns.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from decode_worker.request import DecodeRequest
from engine.steps.draws import SETTINGS, settings_of
from engine.steps.seeded import start_of

SlotIndices = NDArray[np.intp]

NEVER = 1 << 62
"""The number of a step that is never launched."""
BUFFERED_STEPS = 64
"""Steps whose tokens are kept in the buffer before they are appended to their answers."""
_FIRST_PAGES = 16
_EMPTY = -1
"""The last step of a slot without a request."""


@dataclass(slots=True, eq=False)
class BatchSlot:
    """The slot of one running request. Only the running batch changes it, on the engine thread."""

    request: DecodeRequest
    index: int
    """Its index in the columns."""
    first_step: int
    position_offset: int
    """The position of its row, less the number of the step."""
    last_step: int
    """An earlier one once the request was stopped."""
    buffered_from: int
    """The step whose token is the first one that is not yet part of the answer."""
    skipped_steps: tuple[int, ...] = ()
    """Steps between the first and the last that have no row of it, because there was no page."""
    stopped: bool = False
    """The request gets no more rows."""
    dropped: bool = False
    """The request gets no more tokens either."""

    def has_row_in(self, step: int) -> bool:
        """Whether that step has a row of the request."""
        return self.first_step <= step <= self.last_step and step not in self.skipped_steps


class SlotColumns:
    """What steps need of every running request, as columns by slot. They are written when a request joins and when it
    gets a page. Owned by the running batch; page numbers are copies, the pages belong to the requests.
    """

    def __init__(self) -> None:
        self.slots = np.zeros(0, dtype=np.object_)
        self.request_ids = np.zeros(0, dtype=np.object_)
        self.samplings = np.zeros(0, dtype=np.object_)
        self.histories = np.zeros(0, dtype=np.object_)
        self.attempts = np.zeros(0, dtype=np.int64)
        self.routers = np.zeros(0, dtype=np.object_)
        self.last_step = np.zeros(0, dtype=np.int64)
        self.position_offset = np.zeros(0, dtype=np.int64)
        self.answer_offset = np.zeros(0, dtype=np.int64)
        """Index of a row's token in the answer, less the row's position."""
        self.draw_offset = np.zeros(0, dtype=np.int64)
        """Index of a row's draw, less the row's position."""
        self.min_tokens = np.zeros(0, dtype=np.int64)
        self.penalized = np.zeros(0, dtype=np.bool_)
        self.wants_logprobs = np.zeros(0, dtype=np.bool_)
        self.newest_token = np.zeros(0, dtype=np.int64)
        """The last token that has arrived from the engine."""
        self.settings = np.zeros((0, SETTINGS), dtype=np.float64)
        self.seeds = np.zeros(0, dtype=np.uint64)
        """What `seeded.start_of` makes of each seed."""
        self.page_count = np.zeros(0, dtype=np.int32)
        self.page_table = np.zeros((0, _FIRST_PAGES), dtype=np.int32)

    def __len__(self) -> int:
        return len(self.last_step)

    def grow(self, more: int) -> range:
        """Add `more` empty slots and return their indices."""
        first = len(self)
        for name, column in list(vars(self).items()):
            setattr(self, name, np.concatenate((column, np.zeros((more, *column.shape[1:]), dtype=column.dtype))))
        self.last_step[first:] = _EMPTY
        return range(first, first + more)

    def enter(self, slot: BatchSlot) -> None:
        """Write the columns of a request that joins; its pages are still to be copied."""
        at, request, sampling = slot.index, slot.request, slot.request.reservation.sampling
        self.slots[at] = slot
        self.request_ids[at] = request.reservation.ref.request_id
        self.attempts[at] = request.reservation.ref.attempt
        self.routers[at] = request.reservation.router_id
        self.samplings[at] = sampling
        self.histories[at] = request.history
        self.min_tokens[at] = sampling.min_tokens
        self.penalized[at] = request.history is not None
        self.wants_logprobs[at] = sampling.logprobs is not None
        self.newest_token[at] = request.answer[-1]
        self.settings[at] = settings_of(sampling)
        self.seeds[at] = start_of(sampling.seed)
        self.answer_offset[at] = 1 - request.prompt_tokens
        self.draw_offset[at] = request.first_draw - request.prompt_tokens
        self.page_count[at] = 0
        self.page_table[at] = 0
        self.reschedule(slot)

    def reschedule(self, slot: BatchSlot) -> None:
        """The request has its rows in other steps than before."""
        self.last_step[slot.index] = slot.last_step
        self.position_offset[slot.index] = slot.position_offset

    def leave(self, slot: BatchSlot) -> None:
        """Empty the slot, so that it keeps no object alive."""
        at = slot.index
        self.last_step[at] = _EMPTY
        self.slots[at] = self.samplings[at] = self.histories[at] = None

    def copy_pages(self, slot: BatchSlot) -> None:
        """The request has more pages than before."""
        at, pages = slot.index, slot.request.pages
        known, count = int(self.page_count[at]), len(pages)
        if count > self.page_table.shape[1]:
            wide = np.zeros((len(self), max(count, 2 * self.page_table.shape[1])), dtype=self.page_table.dtype)
            wide[:, : self.page_table.shape[1]] = self.page_table
            self.page_table = wide
        if count == known + 1:
            self.page_table[at, known] = pages[known]
        else:
            self.page_table[at, known:count] = pages[known:]
        self.page_count[at] = count


class TokenBuffer:
    """Tokens that have arrived and are not yet part of their answers, by step and slot. To append to hundreds of lists
    in each step would take longer than everything else that a step's tokens need.

    Owned by the running batch. A request's answer is complete once its slot was flushed.
    """

    def __init__(self) -> None:
        self.completed_steps = 0
        """Steps whose tokens have arrived."""
        self._tokens = np.zeros((BUFFERED_STEPS, 0), dtype=np.int64)

    def grow(self, more: int) -> None:
        """Add `more` slots."""
        self._tokens = np.concatenate((self._tokens, np.zeros((BUFFERED_STEPS, more), dtype=np.int64)), axis=1)

    def store(
        self, step: int, indices: SlotIndices, tokens: NDArray[np.int64], all_slots: Collection[BatchSlot]
    ) -> None:
        """Take the tokens of a step, one for each of the slots `indices`."""
        self._tokens[step % BUFFERED_STEPS, indices] = tokens
        self.completed_steps = step + 1
        if not self.completed_steps % BUFFERED_STEPS:
            self._flush_all(all_slots)

    def flush(self, slot: BatchSlot) -> None:
        """Append the buffered tokens of a request to its answer."""
        end = min(self.completed_steps, slot.last_step + 1)
        if not slot.dropped and slot.buffered_from < end:
            first = self.completed_steps - 1 - (self.completed_steps - 1) % BUFFERED_STEPS
            tokens = self._tokens[slot.buffered_from - first : end - first, slot.index].tolist()
            if slot.skipped_steps:
                numbered = enumerate(tokens, slot.buffered_from)
                tokens = [token for step, token in numbered if step not in slot.skipped_steps]
            slot.request.answer.extend(tokens)
            slot.buffered_from = end

    def skip(self, steps: int, all_slots: Collection[BatchSlot]) -> None:
        """Act as if `steps` more steps had completed, each with token 0 for every slot."""
        for slot in all_slots:
            self.flush(slot)
            slot.request.answer.extend([0] * steps)
            slot.buffered_from += steps
        self.completed_steps += steps

    def _flush_all(self, slots: Collection[BatchSlot]) -> None:
        """Empty the buffer before it is used again. At once, this takes a fraction of the time that slots one by one
        would take.
        """
        columns, end = self._tokens.T.tolist(), self.completed_steps
        for slot in slots:
            if slot.skipped_steps or slot.dropped or slot.last_step < end - 1:
                self.flush(slot)
            elif slot.buffered_from < end:
                slot.request.answer.extend(columns[slot.index][slot.buffered_from - end :])
                slot.buffered_from = end
