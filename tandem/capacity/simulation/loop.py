"""A worker's step loop under the virtual clock.

As in `tandem/worker/loop.py`, a step is scheduled and launched while the step before it runs. To be fast, the loop
applies a run of equal decode steps in a single operation. If another component calls the worker during the run, the
steps that have ended are applied first, so that the call sees the state of the worker at its time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from decode_worker.batch_snapshot import DecodedStep
from prefill_worker.scheduler import PrefillScheduler
from tandem.capacity.simulation.clock import VirtualClock
from tandem.capacity.simulation.request import StepLog
from tandem.capacity.simulation.steady import Lookahead, SteadyDecodeScheduler, SteadyRun, after_steps, steady_run
from tandem.cost_model.step_cost import StepCost
from tandem.cost_model.step_work import StepWork
from tandem.engine.steps.batch import ModelRunnerOutput
from tandem.protocol.messages import RoutedEvent
from tandem.worker.scheduler import StepScheduler


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A launched step; `drawn` has the sampled token of each row, decode rows first (None = no token)."""

    work: StepWork
    drawn: Sequence[int | None]
    end_s: float


class InFlightSteps:
    """The steps in flight of a simulated device, at most two; `actual_cost` gives their durations."""

    def __init__(self, actual_cost: StepCost) -> None:
        self._actual_cost = actual_cost
        self.log = StepLog()
        """End times of the completed steps."""
        self.first: InFlightStep | None = None
        """The step that runs and ends next; None if no step runs."""
        self.second: InFlightStep | None = None
        """The step that was launched last; it runs after `first`."""
        self.busy_s = 0.0
        """Total computing time of the device so far, in seconds."""
        self._free_s = 0.0

    @property
    def none(self) -> bool:
        """True if no step is in flight."""
        return self.first is None and self.second is None

    def launch(self, work: StepWork, drawn: Sequence[int | None], now: float, drafting_s: float = 0.0) -> InFlightStep:
        """Launch a step after all earlier ones.

        `drafting_s` is the time in seconds that proposing its draft tokens took.
        """
        seconds = self._actual_cost.seconds(work) + drafting_s
        self._free_s = max(now, self._free_s) + seconds
        self.busy_s += seconds
        return InFlightStep(work, drawn, self._free_s)

    def push(self, launched: InFlightStep | None) -> bool:
        """Make `launched` the newest step; return True if the first step must end before another one may be launched.

        `launched` is None if there was nothing to launch.
        """
        before, self.second = self.second, launched
        if before is not None:
            self.first = before
        return before is not None or launched is None

    def land(self) -> tuple[int, InFlightStep] | None:
        """Complete the first step; return its number in the log and the step, or None if no step runs."""
        landed, self.first = self.first, None
        return None if landed is None else (self.log.add(landed.end_s), landed)

    @property
    def only_decode(self) -> bool:
        """True if two steps are in flight, both without prefill."""
        first, second = self.first, self.second
        return not (first is None or second is None or first.work.prefill_tokens or second.work.prefill_tokens)

    def steady(self, lookahead: Lookahead | None) -> SteadyRun | None:
        """Return the end times of both steps in flight and of the following steps with the same rows.

        Returns None if fewer than two steps are in flight, or if the next step needs a decision.
        """
        if self.first is None or self.second is None or lookahead is None:
            return None
        return steady_run(self._actual_cost, self.second.work, self.first.end_s, self.second.end_s, lookahead)

    def skip(self, run: SteadyRun, steps: int) -> StepWork | None:
        """Advance past the first `steps` steps of a steady run; the two after them are then in flight.

        Return the work of the newest step, or None if nothing was skipped.
        """
        first, second = self.first, self.second
        if first is None or second is None or not steps:
            return None
        self.log.extend(run.ends_s[:steps])
        self.busy_s += run.seconds(steps)
        self.first = InFlightStep(after_steps(first.work, steps), first.drawn, float(run.ends_s[steps]))
        self.second = InFlightStep(after_steps(second.work, steps), second.drawn, float(run.ends_s[steps + 1]))
        self._free_s = self.second.end_s
        return self.second.work


class VirtualStepLoop:
    """Runs both schedulers of a worker on a simulated device.

    It applies runs of equal decode steps in single operations.
    """

    def __init__(
        self,
        clock: VirtualClock,
        scheduler: StepScheduler,
        actual_cost: StepCost,
        *,
        decode: SteadyDecodeScheduler,
        prefill: PrefillScheduler,
        spare_pages: Callable[[], int],
        publish: Callable[[int, StepWork, Sequence[RoutedEvent], DecodedStep | None], None],
        jumps: bool,
    ) -> None:
        """Create the loop; `actual_cost` gives the durations of steps.

        `publish` receives each completed step with its number in the log, except the skipped steps of steady runs.
        `spare_pages` returns the number of free pages for the tokens of decoding requests. Without `jumps`, steps are
        applied one by one.
        """
        self._clock, self._scheduler, self._jumps = clock, scheduler, jumps
        self._decode, self._prefill, self._spare_pages = decode, prefill, spare_pages
        self._publish = publish
        self._in_flight = InFlightSteps(actual_cost)
        self.log = self._in_flight.log
        self._steady: SteadyRun | None = None
        self._plan_number = 0
        self._awaited = False
        """True if a call is scheduled for the end of the running step or of the steady run."""
        self._woken = False
        self._inside = False

    def wake(self) -> None:
        """Mark that there may be work, so that the loop checks for it."""
        self._woken = True

    @contextmanager
    def sync(self) -> Iterator[None]:
        """Return a context in which code outside of a step may change the worker.

        Steps that have ended are applied when the context begins, and the next steps are planned when it ends.
        """
        self._catch_up()
        try:
            yield
        finally:
            self._replan()

    @property
    def idle(self) -> bool:
        """True if no step is in flight."""
        return self._in_flight.none

    @property
    def busy_s(self) -> float:
        """Total computing time of the device so far, in seconds."""
        run = self._steady
        return self._in_flight.busy_s + (0.0 if run is None else run.seconds(run.ended_steps(self._clock.now)))

    @property
    def decoding(self) -> StepWork:
        """The work of the decode rows of the newest step."""
        newest, run = self._scheduler.decoding, self._steady
        return newest if run is None else after_steps(newest, run.ended_steps(self._clock.now))

    def _catch_up(self) -> None:
        """Apply the ended steps of a steady run, if any of them has needed a new KV page.

        Without a new page they are applied later, because no caller can see the difference.
        """
        if self._steady is not None and self._clock.now >= self._steady.first_page_s:
            self._pass(self._steady, self._steady.ended_steps(self._clock.now))

    def _replan(self) -> None:
        """Start an idle loop that has work, or end a steady run that a change has made invalid."""
        if self._inside:
            return
        if self.idle and self._woken:
            self._inside = True
            self._step()
            self._inside = False
        run = self._steady
        if run is not None and (self._changes or self._spare_pages() <= run.lookahead.needed):
            self._pass(run, run.ended_steps(self._clock.now))
        if not self._awaited:
            self._wait()

    def _step(self) -> None:
        """Launch steps until one runs and another one follows it, or until nothing is left to launch."""
        while not self._in_flight.push(self._launch()):
            pass

    def _launch(self) -> InFlightStep | None:
        planned = self._scheduler.plan()
        if planned is None:
            return None
        chunks = [None if row.draw is None else 0 for row in planned.batch.chunks]
        return self._in_flight.launch(
            planned.work, [*[0] * len(planned.batch.tokens), *chunks], self._clock.now, planned.drafting_s
        )

    def _finish(self, number: int, step: InFlightStep) -> None:
        """Apply a completed step, given its number in the log."""
        events, decoded = self._scheduler.apply(step.work, ModelRunnerOutput(step.drawn))
        self._prefill.deliver_updates()
        self._publish(number, step.work, events, decoded)

    def _on_time(self, plan_number: int) -> None:
        """Handle the end of a step or of a steady run.

        Ignored if `plan_number` is outdated because the loop planned again.
        """
        if plan_number != self._plan_number:
            return
        self._inside = True
        if self._steady is not None:
            self._pass(self._steady, self._steady.lookahead.steps)
        landed = self._in_flight.land()
        if landed is not None:
            self._finish(*landed)
        self._step()
        self._decode.learn()
        self._inside = False
        self._wait()

    def _wait(self) -> None:
        """Schedule `_on_time` for the end of the running step or of the steady run."""
        self._plan_number += 1
        self._steady = self._woken_steady()
        step = self._in_flight.first
        self._awaited = step is not None
        if step is None:
            return
        end_s = step.end_s if self._steady is None else float(self._steady.ends_s[self._steady.lookahead.steps])
        self._clock.at(end_s, partial(self._on_time, self._plan_number))

    def _woken_steady(self) -> SteadyRun | None:
        """Return the run of equal steps that starts with those in flight; None if there is none."""
        self._woken = False
        if not self._jumps or not self._in_flight.only_decode or self._changes:
            return None
        return self._in_flight.steady(self._decode.lookahead(self._spare_pages()))

    @property
    def _changes(self) -> bool:
        """True if requests wait to join a step, or a decoding one was cancelled."""
        return self._decode.batch_changes or bool(self._prefill.waiting().prompts)

    def _pass(self, run: SteadyRun, steps: int) -> None:
        """Apply the next `steps` steps of the steady run, and end the run."""
        self._steady, self._awaited = None, False
        newest = self._in_flight.skip(run, steps)
        if newest is not None:
            self._decode.pass_steps(steps)
            self._scheduler.decoding = newest
