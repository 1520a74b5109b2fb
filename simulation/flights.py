"""The steps that a simulated device was given: when each ends, and many that are alike at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from costs.step_cost import StepCost, StepWork
from simulation.steady import Ahead, SteadyRun, later, steady_run
from simulation.step_log import StepLog


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was launched: its first rows decode, `drawn` is what all of them draw."""

    work: StepWork
    drawn: Sequence[int | None]
    end_s: float


class Flights:
    """At most two: one runs, one is launched behind it. Steps follow each other as `truth` says."""

    def __init__(self, truth: StepCost) -> None:
        self._truth = truth
        self.log = StepLog()
        """Ends of the steps whose results were heard."""
        self.first: Flight | None = None
        """Whose end is waited for; None while nothing runs."""
        self.second: Flight | None = None
        """The newest."""
        self.busy_s = 0.0
        """Time of the device so far."""
        self._free_s = 0.0

    @property
    def none(self) -> bool:
        """Whether the device is idle."""
        return self.first is None and self.second is None

    def launch(self, work: StepWork, drawn: Sequence[int | None], now: float) -> Flight:
        """Behind all that were launched before."""
        seconds = self._truth.seconds(work)
        self._free_s = max(now, self._free_s) + seconds
        self.busy_s += seconds
        return Flight(work, drawn, self._free_s)

    def push(self, launched: Flight | None) -> bool:
        """It is the newest now, if there is one; whether nothing more is to be launched until the first has ended."""
        before, self.second = self.second, launched
        if before is not None:
            self.first = before
        return before is not None or launched is None

    def land(self) -> tuple[int, Flight] | None:
        """The first has ended → its number in the log, and what it was."""
        landed, self.first = self.first, None
        return None if landed is None else (self.log.add(landed.end_s), landed)

    @property
    def only_decode(self) -> bool:
        """Whether there are two, both without prompts."""
        first, second = self.first, self.second
        return not (first is None or second is None or first.work.prefill_tokens or second.work.prefill_tokens)

    def steady(self, ahead: Ahead | None) -> SteadyRun | None:
        """The ends of both, and of those ahead, which decode the same rows."""
        if self.first is None or self.second is None or ahead is None:
            return None
        return steady_run(self._truth, self.second.work, self.first.end_s, self.second.end_s, ahead)

    def skip(self, run: SteadyRun, steps: int) -> StepWork | None:
        """The first steps of a steady run are over → what is in the newest launch; None: nothing was skipped."""
        first, second = self.first, self.second
        if first is None or second is None or not steps:
            return None
        self.log.extend(run.ends_s[:steps])
        self.busy_s += run.seconds(steps)
        self.first = Flight(later(first.work, steps), first.drawn, float(run.ends_s[steps]))
        self.second = Flight(later(second.work, steps), second.drawn, float(run.ends_s[steps + 1]))
        self._free_s = self.second.end_s
        return self.second.work
