"""Many steps at once: while nobody comes, goes or waits, one decode step is as the one before, with longer contexts."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from costs.step_cost import StepCost, StepWork
from decode_worker.half import DecodeHalf

_LAUNCHED = 2
"""Steps in flight while a worker waits: one runs, one is behind it."""


@dataclass(frozen=True, slots=True)
class SteadyRun:
    """Steps that end at `ends_s`; all but the last two need no look at anybody."""

    ends_s: NDArray[np.float64]

    @property
    def steps(self) -> int:
        """Steps that may be taken at once."""
        return len(self.ends_s) - _LAUNCHED

    def over(self, now: float) -> int:
        """How many of them are, by now."""
        return int(np.searchsorted(self.ends_s[: self.steps], now, side="right"))


class SteadyDecodeHalf(DecodeHalf):
    """The decode half, and what many of its steps amount to when they are alike."""

    def steady_steps(self, spare_pages: int) -> int:
        """How many more steps can be launched with exactly the rows of those that run, if `spare_pages` are nobody's;
        0 = look again.
        """
        batch = self._batch
        if len(batch.flying) != _LAUNCHED or any(len(cohort) != len(batch) for _, cohort in batch.flying):
            return 0
        steps = batch.alike()
        if not steps or spare_pages > len(batch) * (2 + steps // batch.page_tokens):
            return steps
        return min(steps, batch.paged())

    def pass_steps(self, steps: int) -> None:
        """As so many times `apply`, each followed by `schedule`: nobody has joined or left."""
        while steps:
            paged = min(steps, self._batch.paged())
            if paged:
                self._batch.skip(paged)
                steps -= paged
            else:
                self._give_pages()


def steady_run(cost: StepCost, work: StepWork, first_s: float, second_s: float, steps: int) -> SteadyRun:
    """The ends of two steps that were launched, the second with `work`, and of so many more behind them."""
    p = cost.parameters
    seconds = cost.decode_step_seconds(work.decode_rows, work.decode_context_tokens)
    each = seconds + p.context_s * work.decode_rows * np.arange(1, steps + 1)
    return SteadyRun(np.concatenate(([first_s, second_s], second_s + np.cumsum(each))))


def later(work: StepWork, steps: int) -> StepWork:
    """A decode step so many steps on."""
    rows = work.decode_rows
    return StepWork(decode_rows=rows, decode_context_tokens=work.decode_context_tokens + rows * steps)
