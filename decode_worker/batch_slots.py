"""The slots of the running batch: which steps have a row of each request, and the columns that describe the rows.

Steps are numbered from 0 in launch order. A request that has a row in each step from `first_step` to `last_step` is
described by constants: in step n, its row has position `position_offset` + n. These constants do not change from step
to step, so a step of hundreds of rows takes only a few operations on columns.
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
"""Value of `last_step` in the columns for a slot without a request."""


@dataclass(slots=True, eq=False)
class BatchSlot:
    """The slot of one running request. Only the running batch changes it, on the engine thread."""

    request: DecodeRequest
    index: int
    """The slot's index in the columns."""
    first_step: int
    """The first step with a row of the request."""
    position_offset: int
    """The position of the request's row minus the step: in step n, the row has position `position_offset` + n."""
    last_step: int
    """The last step with a row of the request; lowered when the request is stopped."""
    buffered_from: int
    """The first step whose token has not been appended to the answer yet (`TokenBuffer`)."""
    skipped_steps: tuple[int, ...] = ()
    """Steps between the first and the last in which the request had no row because it had no page."""
    stopped: bool = False
    """True if no further rows are planned for the request."""
    dropped: bool = False
    """True if the request gets no further tokens: those of its rows in flight are discarded."""

    def has_row_in(self, step: int) -> bool:
        """Return True if step `step` has a row of the request."""
        return self.first_step <= step <= self.last_step and step not in self.skipped_steps


class SlotSchedule:
    """A schedule that maps step numbers to slots; a slot is scheduled for at most one step.

    A slot that leaves the batch must be removed; otherwise the schedule would keep a reference to its ended request.
    Owned by the running batch.
    """

    def __init__(self) -> None:
        self._steps: dict[BatchSlot, int] = {}
        self._slots: dict[int, dict[BatchSlot, None]] = {}

    def __contains__(self, step: int) -> bool:
        """Return True if any slot is scheduled for this step."""
        return step in self._slots

    def __iter__(self) -> Iterator[int]:
        """Iterate over the steps that have scheduled slots."""
        return iter(self._slots)

    def put(self, slot: BatchSlot, step: int) -> None:
        """Schedule the slot for `step`; if it was scheduled for another step, it is removed there."""
        self.remove(slot)
        self._steps[slot] = step
        self._slots.setdefault(step, {})[slot] = None

    def remove(self, slot: BatchSlot) -> None:
        """Remove the slot from the schedule, if it is scheduled."""
        step = self._steps.pop(slot, None)
        if step is not None:
            slots = self._slots[step]
            del slots[slot]
            if not slots:
                del self._slots[step]

    def pop(self, step: int) -> list[BatchSlot]:
        """Remove and return the slots that are scheduled for `step`, in the order in which they were scheduled."""
        slots = list(self._slots.pop(step, ()))
        for slot in slots:
            del self._steps[slot]
        return slots


class SlotColumns:
    """The data of the running requests that steps need, as columns indexed by slot.

    A slot's entries are written when its request joins and when the request gets a page. Owned by the running batch.
    The page numbers are copies; the request owns the pages.
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
        """The row at position p samples the answer token with index `answer_offset` + p."""
        self.draw_offset = np.zeros(0, dtype=np.int64)
        """The row at position p uses random number `draw_offset` + p of the request's random sequence."""
        self.masked_tokens = np.zeros(0, dtype=np.int64)
        self.looks_back = np.zeros(0, dtype=np.bool_)
        self.wants_logprobs = np.zeros(0, dtype=np.bool_)
        self.newest_token = np.zeros(0, dtype=np.int64)
        """The newest token known to the host: from the engine, or from the request when it joined."""
        self.settings = np.zeros((0, SETTINGS), dtype=np.float64)
        self.seeds = np.zeros(0, dtype=np.uint64)
        """The start of each request's random sequence, computed from its seed (`seeded.start_of`)."""
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
        """Write the columns of a slot whose request joins, except its pages; call `copy_pages` next."""
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
        """Copy `last_step` and `position_offset` of a slot whose rows have moved to other steps."""
        self.last_step[slot.index] = slot.last_step
        self.position_offset[slot.index] = slot.position_offset

    def leave(self, slot: BatchSlot) -> None:
        """Mark the slot as empty and drop its references to objects of the request."""
        at = slot.index
        self.last_step[at] = _EMPTY
        self.slots[at] = self.samplings[at] = self.histories[at] = None

    def copy_pages(self, slot: BatchSlot) -> None:
        """Append to the slot's page table the pages that its request got since the last call."""
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
