"""Many steps at once: while nobody comes, goes or waits, one decode step is as the one before, with longer contexts."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from costs.step_cost import StepCost, StepWork
from decode_worker.half import DecodeHalf

_LAUNCHED = 2
"""Steps in flight while a worker waits: one runs, one is behind it."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """How far a decode half can go without a look at anybody."""

    steps: int
    """More launches with exactly the rows of those that run."""
    untouched: int
    """The first of them, which take no page."""
    needed: int = -1
    """All of it holds while more pages than these are nobody's."""


@dataclass(frozen=True, slots=True)
class SteadyRun:
    """Steps that end at `ends_s`; all but the last two need no look at anybody."""

    ends_s: NDArray[np.float64]
    ahead: Ahead
    turn_s: float
    """When it takes its first page."""

    def over(self, now: float) -> int:
        """How many of the steps are, by now."""
        return min(self.ahead.steps, int(self.ends_s.searchsorted(now, side="right")))

    def seconds(self, steps: int) -> float:
        """Of so many launches behind the two."""
        return float(self.ends_s[steps + 1] - self.ends_s[1])


class SteadyDecodeHalf(DecodeHalf):
    """The decode half, and what many of its steps amount to when they are alike."""

    @property
    def ready_requests(self) -> int:
        """Requests that wait to join it."""
        return self._requests.ready

    def look_ahead(self, spare_pages: int) -> Ahead | None:
        """If `spare_pages` are nobody's; None = every step needs a look."""
        batch = self._batch
        if len(batch.in_flight_steps) != _LAUNCHED or any(
            len(snapshot) != len(batch) for _, snapshot in batch.in_flight_steps
        ):
            return None
        steps = batch.identical_steps()
        if not steps:
            return None
        untouched, needed = min(steps, batch.steps_without_new_page()), len(batch) * (2 + steps // batch.page_tokens)
        if spare_pages > needed:
            return Ahead(steps, untouched, needed)
        return Ahead(untouched, untouched) if untouched else None

    def pass_steps(self, steps: int) -> None:
        """As so many times `apply`, each followed by `schedule`: nobody has joined or left."""
        while steps:
            paged = min(steps, self._batch.steps_without_new_page())
            if paged:
                self._batch.skip(paged)
                steps -= paged
            else:
                self._allocate_pages()


def steady_run(cost: StepCost, work: StepWork, first_s: float, second_s: float, ahead: Ahead) -> SteadyRun:
    """The ends of two steps that were launched, the second with `work`, and of those behind them: the very moments that
    the steps one by one would have.
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
    """A decode step so many steps on."""
    rows = work.decode_rows
    return StepWork(decode_rows=rows, decode_context_tokens=work.decode_context_tokens + rows * steps)
