"""Measures steps and teaches the cost model what they took."""

import time
from collections.abc import Callable

from costs.step_cost import CostParameters, StepCost
from costs.step_fit import StepFit
from costs.step_work import StepWork


class StepMeter:
    """Belongs to the engine thread; any thread may read `parameters`.

    A step that was launched while another ran begins when that one's results are here: the time from result to result
    is the time between tokens. After a gap a step begins with its own schedule.
    """

    def __init__(
        self,
        guess: CostParameters,
        clock: Callable[[], float] = time.perf_counter,
        on_step: Callable[[StepWork, float, float], None] = lambda _work, _seconds, _predicted_s: None,
    ) -> None:
        """`guess` is what predictions begin with; `clock` returns seconds.

        `on_step` is called for each step with its work, the seconds it took and the seconds that were predicted.
        """
        self._fit = StepFit(guess)
        self._clock = clock
        self.on_step = on_step
        self._last_end = float("-inf")
        self._ended: list[tuple[StepWork, float]] = []
        """Steps that were not learned from yet, each with its seconds."""

    @property
    def parameters(self) -> CostParameters:
        """The newest fit and its error."""
        return self._fit.parameters

    def cost(self) -> StepCost:
        """Return the cost model with the newest fit."""
        return StepCost(self._fit.parameters)

    def begin(self) -> float:
        """Return the time, for `end`."""
        return self._clock()

    def end(self, work: StepWork, began: float) -> None:
        """Note a step whose results are here."""
        now = self._clock()
        self._ended.append((work, now - max(began, self._last_end)))
        self._last_end = now

    def learn(self) -> None:
        """Learn from the steps that have ended. It belongs between steps, when no router waits for their output."""
        for work, seconds in self._ended:
            self.on_step(work, seconds, self._fit.observe(work, seconds))
        self._ended.clear()
