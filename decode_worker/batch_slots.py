"""The slots of the running batch: in which steps each request has a row, and the columns that describe the rows.

Steps are numbered from 0 in launch order. A request that has a row in each step from `first_step` to `last_step` is
described by constants: its row of step n has position `position_offset` + n. Nothing about it changes from step to
step, so a step of hundreds of rows takes a few operations on columns.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from decode_worker.request import DecodeRequest
from tandem.engine.steps.sampling_metadata import SETTINGS, settings_of
from tandem.engine.steps.seeded import start_of

SlotIndices = NDArray[np.intp]

_FIRST_PAGES = 16
_EMPTY = -1
"""The last step of a slot without a request."""


@dataclass(slots=True, eq=False)
class BatchSlot:
    """The slot of one running request. Only the running batch changes it, on the engine thread."""

    request: DecodeRequest
    index: int
    """The slot's index in the columns."""
    first_step: int
    """The first step with a row of the request."""
    position_offset: int
    """The row of step n has position `position_offset` + n."""
    last_step: int
    """The last step with a row of the request; it becomes an earlier one when the request is stopped."""
    buffered_from: int
    """The first step whose token was not appended to the answer yet (`TokenBuffer`)."""
    skipped_steps: tuple[int, ...] = ()
    """Steps between the first and the last without a row of the request, because it had no page."""
    stopped: bool = False
    """True if the request gets no more rows."""
    dropped: bool = False
    """True if the request gets no more tokens either."""

    def has_row_in(self, step: int) -> bool:
        """Return True if that step has a row of the request."""
        return self.first_step <= step <= self.last_step and step not in self.skipped_steps


class SlotSchedule:
    """Slots by the number of a step, each slot under at most one step.

    A slot that leaves the batch must be removed, whatever its step; otherwise it would keep its ended request alive.
    Owned by the running batch.
    """

    def __init__(self) -> None:
        self._steps: dict[BatchSlot, int] = {}
        self._slots: dict[int, dict[BatchSlot, None]] = {}

    def __contains__(self, step: int) -> bool:
        """Return True if there are slots under this step."""
        return step in self._slots

    def __iter__(self) -> Iterator[int]:
        """Iterate over the steps that have slots."""
        return iter(self._slots)

    def put(self, slot: BatchSlot, step: int) -> None:
        """Put the slot under `step`, and remove it from the step that it was under before."""
        self.remove(slot)
        self._steps[slot] = step
        self._slots.setdefault(step, {})[slot] = None

    def remove(self, slot: BatchSlot) -> None:
        """Remove the slot if it is under any step."""
        step = self._steps.pop(slot, None)
        if step is not None:
            slots = self._slots[step]
            del slots[slot]
            if not slots:
                del self._slots[step]

    def pop(self, step: int) -> list[BatchSlot]:
        """Remove the slots under `step` and return them, in the order in which they were put there."""
        slots = list(self._slots.pop(step, ()))
        for slot in slots:
            del self._steps[slot]
        return slots


class SlotColumns:
    """The data of each running request that steps need, as columns indexed by slot.

    They are written when a request joins and when it gets a page. Owned by the running batch. Page numbers are copies,
    as the request owns the pages.
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
        """The row at position p draws the token with index `answer_offset` + p of the answer."""
        self.draw_offset = np.zeros(0, dtype=np.int64)
        """The row at position p uses draw number `draw_offset` + p of the request's random sequence."""
        self.masked_tokens = np.zeros(0, dtype=np.int64)
        self.looks_back = np.zeros(0, dtype=np.bool_)
        self.wants_logprobs = np.zeros(0, dtype=np.bool_)
        self.newest_token = np.zeros(0, dtype=np.int64)
        """The newest token that has arrived: from the engine, or with the request when it joined."""
        self.settings = np.zeros((0, SETTINGS), dtype=np.float64)
        self.seeds = np.zeros(0, dtype=np.uint64)
        """`seeded.start_of` of each seed."""
        self.page_count = np.zeros(0, dtype=np.int32)
        self.adapters = np.zeros(0, dtype=np.int32)
        self.page_table = np.zeros((0, _FIRST_PAGES), dtype=np.int32)

    def __len__(self) -> int:
        """Return the number of slots."""
        return len(self.last_step)

    def grow(self, more: int) -> range:
        """Add `more` empty slots and return their indices."""
        first = len(self)
        for name, column in list(vars(self).items()):
            setattr(self, name, np.concatenate((column, np.zeros((more, *column.shape[1:]), dtype=column.dtype))))
        self.last_step[first:] = _EMPTY
        return range(first, first + more)

    def enter(self, slot: BatchSlot) -> None:
        """Write the columns of a request that joins, without its pages; call `copy_pages` next."""
        at, request, sampling = slot.index, slot.request, slot.request.reservation.sampling
        self.slots[at] = slot
        self.request_ids[at] = request.reservation.ref.request_id
        self.attempts[at] = request.reservation.ref.attempt
        self.routers[at] = request.reservation.router_id
        self.samplings[at] = sampling
        self.histories[at] = request.history
        self.masked_tokens[at] = sampling.masked_tokens
        self.looks_back[at] = request.history is not None
        self.wants_logprobs[at] = sampling.logprobs is not None
        self.newest_token[at] = request.answer[-1]
        self.settings[at] = settings_of(sampling)
        self.seeds[at] = start_of(sampling.seed)
        self.answer_offset[at] = 1 - request.prompt_tokens
        self.draw_offset[at] = request.first_draw - request.prompt_tokens
        self.adapters[at] = request.adapter
        self.page_count[at] = 0
        self.page_table[at] = 0
        self.reschedule(slot)

    def reschedule(self, slot: BatchSlot) -> None:
        """Copy `last_step` and `position_offset` of a request whose rows moved to other steps."""
        self.last_step[slot.index] = slot.last_step
        self.position_offset[slot.index] = slot.position_offset

    def leave(self, slot: BatchSlot) -> None:
        """Empty the slot, so that it keeps no object alive."""
        at = slot.index
        self.last_step[at] = _EMPTY
        self.slots[at] = self.samplings[at] = self.histories[at] = None

    def copy_pages(self, slot: BatchSlot) -> None:
        """Copy the numbers of the pages that the request got since the last copy."""
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
