"""The steps in flight on a simulated device: when each ends, and many equal steps at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.capacity.simulation.steady import Ahead, SteadyRun, later, steady_run
from tandem.capacity.simulation.step_log import StepLog
from tandem.cost_model.step_cost import StepCost
from tandem.cost_model.step_work import StepWork


@dataclass(frozen=True, slots=True)
class Flight:
    """A launched step; its first rows decode, and `drawn` has the draws of all rows."""

    work: StepWork
    drawn: Sequence[int | None]
    end_s: float


class Flights:
    """At most two steps in flight: one runs, one is launched behind it. `truth` gives their durations."""

    def __init__(self, truth: StepCost) -> None:
        self._truth = truth
        self.log = StepLog()
        """End times of the completed steps."""
        self.first: Flight | None = None
        """The step whose end is awaited; None while nothing runs."""
        self.second: Flight | None = None
        """The newest step."""
        self.busy_s = 0.0
        """Seconds that the device has computed so far."""
        self._free_s = 0.0

    @property
    def none(self) -> bool:
        """True if the device is idle."""
        return self.first is None and self.second is None

    def launch(self, work: StepWork, drawn: Sequence[int | None], now: float, drafting_s: float = 0.0) -> Flight:
        """Launches a step behind all earlier ones; `drafting_s` is what proposing its drafts took."""
        seconds = self._truth.seconds(work) + drafting_s
        self._free_s = max(now, self._free_s) + seconds
        self.busy_s += seconds
        return Flight(work, drawn, self._free_s)

    def push(self, launched: Flight | None) -> bool:
        """Makes `launched` the newest step; returns True if no more steps are to be launched until the first ends."""
        before, self.second = self.second, launched
        if before is not None:
            self.first = before
        return before is not None or launched is None

    def land(self) -> tuple[int, Flight] | None:
        """Completes the first step; returns its number in the log and the step, None without one."""
        landed, self.first = self.first, None
        return None if landed is None else (self.log.add(landed.end_s), landed)

    @property
    def only_decode(self) -> bool:
        """True if two steps are in flight, both without prefill."""
        first, second = self.first, self.second
        return not (first is None or second is None or first.work.prefill_tokens or second.work.prefill_tokens)

    def steady(self, ahead: Ahead | None) -> SteadyRun | None:
        """Returns the end times of both steps and of those `ahead`, which decode the same rows; None without them."""
        if self.first is None or self.second is None or ahead is None:
            return None
        return steady_run(self._truth, self.second.work, self.first.end_s, self.second.end_s, ahead)

    def skip(self, run: SteadyRun, steps: int) -> StepWork | None:
        """Skips the first steps of a steady run; returns the newest launch's work, None if nothing was skipped."""
        first, second = self.first, self.second
        if first is None or second is None or not steps:
            return None
        self.log.extend(run.ends_s[:steps])
        self.busy_s += run.seconds(steps)
        self.first = Flight(later(first.work, steps), first.drawn, float(run.ends_s[steps]))
        self.second = Flight(later(second.work, steps), second.drawn, float(run.ends_s[steps + 1]))
        self._free_s = self.second.end_s
        return self.second.work
