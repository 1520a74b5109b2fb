"""Runs of equal decode steps: while no request joins, ends or waits, steps differ only in their growing contexts."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from costs.step_cost import StepCost
from costs.step_work import StepWork
from decode_worker.half import DecodeHalf

_LAUNCHED = 2
"""Steps in flight while a worker waits: one runs, one is behind it."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """The number of steps that a decode half can take without any decision."""

    steps: int
    """Further launches with exactly the rows of those in flight."""
    untouched: int
    """The first of them, which take no new KV page."""
    needed: int = -1
    """The run holds while more pages than this are free."""


@dataclass(frozen=True, slots=True)
class SteadyRun:
    """Steps that end at `ends_s`; all but the last two need no decision."""

    ends_s: NDArray[np.float64]
    ahead: Ahead
    turn_s: float
    """Time at which the run takes its first KV page."""

    def over(self, now: float) -> int:
        """Returns the number of steps that have ended by `now`."""
        return min(self.ahead.steps, int(self.ends_s.searchsorted(now, side="right")))

    def seconds(self, steps: int) -> float:
        """Returns the seconds of `steps` launches after the two in flight."""
        return float(self.ends_s[steps + 1] - self.ends_s[1])


class SteadyDecodeHalf(DecodeHalf):
    """A decode half that can apply many equal steps at once."""

    @property
    def ready_requests(self) -> int:
        """Number of requests that wait to join the batch."""
        return len(self._requests.ready)

    def look_ahead(self, spare_pages: int) -> Ahead | None:
        """Returns the steps that need no decision if `spare_pages` are free; None = every step needs one."""
        batch = self._batch
        if len(batch.in_flight_steps) != _LAUNCHED or any(
            len(snapshot) != len(batch) for _, snapshot in batch.in_flight_steps
        ):
            return None
        steps = batch.identical_steps()
        if not steps:
            return None
        untouched = min(steps, batch.steps_without_new_page())
        needed = len(batch) * batch.kv.groups * (2 + steps // batch.kv.page_tokens)
        if spare_pages > needed:
            return Ahead(steps, untouched, needed)
        return Ahead(untouched, untouched) if untouched else None

    def pass_steps(self, steps: int) -> None:
        """Applies `steps` steps, like as many calls of `apply` and `schedule` while no request joins or ends."""
        while steps:
            paged = min(steps, self._batch.steps_without_new_page())
            if paged:
                self._batch.skip(paged)
                steps -= paged
            else:
                self._allocate_pages()


def steady_run(cost: StepCost, work: StepWork, first_s: float, second_s: float, ahead: Ahead) -> SteadyRun:
    """Returns the end times of two launched steps, the second with `work`, and of the steps ahead.

    They equal those of the steps taken one by one.
    """
    p, rows = cost.parameters, work.decode_rows
    contexts = work.decode_context_tokens + rows * np.arange(1, ahead.steps + 1)
    ends_s = np.empty(ahead.steps + _LAUNCHED)
    ends_s[0], ends_s[1] = first_s, second_s
    ends_s[2:] = p.base_s + p.row_s * rows + p.context_s * contexts
    np.cumsum(ends_s[1:], out=ends_s[1:])
    turn_s = float(ends_s[ahead.untouched]) if ahead.untouched < ahead.steps else math.inf
    return SteadyRun(ends_s, ahead, turn_s)


def later(work: StepWork, steps: int) -> StepWork:
    """Returns a decode step's work after `steps` further steps."""
    rows = work.decode_rows
    return StepWork(decode_rows=rows, decode_context_tokens=work.decode_context_tokens + rows * steps)
