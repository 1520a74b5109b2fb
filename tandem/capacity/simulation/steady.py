"""Steady runs: decode steps with the same rows, because no request joins, ends or waits; only their contexts grow."""

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from decode_worker.batch_snapshot import BatchSnapshot
from decode_worker.drafting_batch import DraftingBatch
from decode_worker.scheduler import DecodeScheduler
from tandem.capacity.simulation.drafts import Drafts
from tandem.cost_model.step_cost import StepCost
from tandem.cost_model.step_work import StepWork
from tandem.protocol.kv_pages import KvPages

_LAUNCHED = 2
"""Number of steps in flight in a steady run: one runs, and one is launched after it."""
_NEVER = 1 << 62
"""A step number that is never reached."""


@dataclass(frozen=True, slots=True)
class Lookahead:
    """The number of further decode steps that need no decision of the scheduler."""

    steps: int
    """Number of further steps with exactly the rows of the steps in flight."""
    untouched: int
    """Number of these steps that run before the first one that needs a new KV page."""
    needed: int = -1
    """The run is valid only while more than this number of pages is free."""


@dataclass(frozen=True, slots=True)
class SteadyRun:
    """A run of equal decode steps that end at the times `ends_s`; it begins with the two steps in flight.

    The scheduler has no decision to make until all but the last two of these steps have ended.
    """

    ends_s: NDArray[np.float64]
    lookahead: Lookahead
    first_page_s: float
    """Time at which a step of the run first needs a new KV page; infinite if none does."""

    def ended_steps(self, now: float) -> int:
        """Return the number of steps that have ended by `now`."""
        return min(self.lookahead.steps, int(self.ends_s.searchsorted(now, side="right")))

    def seconds(self, steps: int) -> float:
        """Return the duration in seconds of the first `steps` steps that are launched after the two in flight."""
        return float(self.ends_s[steps + 1] - self.ends_s[1])


class SteadyBatch(DraftingBatch):
    """A running batch that can skip many steps at once, provided that no request has draft tokens."""

    def __init__(self, slots: int, kv: KvPages) -> None:
        """Create the batch like `RunningBatch`; a step reads a request's KV once for all of the request's rows."""
        super().__init__(slots, kv)
        self.kv_read_once = True
        self._first_end: tuple[BatchSnapshot | None, int] = None, 0
        """A snapshot of the batch, and the number of the first step in which one of its requests ends."""

    def identical_steps(self) -> int:
        """Return the number of further steps in which every request has a row and none ends, if there are enough pages.

        Returns 0 if a request has a pending event.
        """
        snapshot = self._snapshot
        if self._with_events or self._stopped or snapshot is None or len(snapshot) < len(self._slots):
            return 0
        if self._first_end[0] is not snapshot:
            self._first_end = snapshot, min(slot.last_step for slot in snapshot.slots)
        return self._first_end[1] + 1 - self._next_step

    def steps_without_new_page(self) -> int:
        """Return a lower bound on the number of further steps that need no new page."""
        return 0 if self._without_page else min(self._page_steps, default=_NEVER) - self._next_step

    def skip(self, steps: int) -> None:
        """Advance as if `steps` steps had been launched and completed, each with token 0 for every row.

        `steps` must not exceed `identical_steps` and `steps_without_new_page`.
        """
        for slot in self._slots.values():
            self._tokens.flush(slot)
            slot.request.answer.extend([0] * steps)
            slot.buffered_from += steps
        self._tokens.completed_steps += steps
        self._columns.newest_token[:] = 0
        self._next_step += steps
        if self._next_step - 1 in self._last_steps:
            self._snapshot = None
        self.in_flight_steps = deque((step + steps, snapshot) for step, snapshot in self.in_flight_steps)


class SteadyDecodeScheduler(DecodeScheduler):
    """A decode scheduler that can apply many equal steps in a single operation."""

    _batch: SteadyBatch

    def __init__(self, *, kv: KvPages, max_batch_requests: int, drafts: Drafts | None = None, **others: Any) -> None:
        """Create the scheduler like `DecodeScheduler`; with `drafts`, every step needs a decision."""
        super().__init__(kv=kv, max_batch_requests=max_batch_requests, **others)
        self._batch = SteadyBatch(max_batch_requests, kv)
        if drafts is not None:
            self.speculation = drafts.speculation(self._batch, self._grow_ahead)

    @property
    def batch_changes(self) -> bool:
        """True if requests wait to join the batch, or a running one was cancelled since the last step."""
        return bool(self._requests.ready) or self._requests.cancelled != self._cancelled

    def lookahead(self, spare_pages: int) -> Lookahead | None:
        """Return the number of steps that need no decision if `spare_pages` pages are free.

        Returns None if the next step needs one.
        """
        batch = self._batch
        if (
            self.speculation is not None
            or len(batch.in_flight_steps) != _LAUNCHED
            or any(len(snapshot) != len(batch) for _, snapshot in batch.in_flight_steps)
        ):
            return None
        steps = batch.identical_steps()
        if not steps:
            return None
        untouched = min(steps, batch.steps_without_new_page())
        needed = len(batch) * batch.kv.groups * (2 + steps // batch.kv.page_tokens)
        if spare_pages > needed:
            return Lookahead(steps, untouched, needed)
        return Lookahead(untouched, untouched) if untouched else None

    def pass_steps(self, steps: int) -> None:
        """Apply `steps` steps at once, with the effect of calling `apply` and `schedule` for each.

        No request may join or end during these steps.
        """
        while steps:
            paged = min(steps, self._batch.steps_without_new_page())
            if paged:
                self._batch.skip(paged)
                steps -= paged
            else:
                self._allocate_pages()


def steady_run(cost: StepCost, work: StepWork, first_s: float, second_s: float, lookahead: Lookahead) -> SteadyRun:
    """Return the run that begins with two launched steps, which end at `first_s` and `second_s`.

    The second of them has `work`, and the `lookahead.steps` steps after it have the same rows. The end times equal
    those of steps that are simulated one by one.
    """
    rows = work.decode_rows
    contexts = (work.decode_context_tokens + rows * np.arange(1, lookahead.steps + 1)).astype(np.float64)
    ends_s = np.empty(lookahead.steps + _LAUNCHED)
    ends_s[0], ends_s[1] = first_s, second_s
    ends_s[2:] = cost.rows_seconds(rows, contexts)
    np.cumsum(ends_s[1:], out=ends_s[1:])
    first_page_s = float(ends_s[lookahead.untouched]) if lookahead.untouched < lookahead.steps else math.inf
    return SteadyRun(ends_s, lookahead, first_page_s)


def after_steps(work: StepWork, steps: int) -> StepWork:
    """Return a decode step's work after `steps` further steps: contexts grow by one token per row and step."""
    rows = work.decode_rows
    return StepWork(decode_rows=rows, decode_context_tokens=work.decode_context_tokens + rows * steps)
