"""A worker's step loop under the virtual clock.

As in `tandem/worker/loop.py` a step is planned and launched while the one before it runs. A call from outside finds the
worker's state of that time: skipped steps are applied first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

from decode_worker.batch_snapshot import DecodedStep
from prefill_worker.half import PrefillHalf
from tandem.capacity.simulation.clock import VirtualClock
from tandem.capacity.simulation.flights import Flight, Flights
from tandem.capacity.simulation.steady import SteadyDecodeHalf, SteadyRun, later
from tandem.cost_model.step_cost import StepCost
from tandem.cost_model.step_work import StepWork
from tandem.engine.steps.batch import ModelRunnerOutput
from tandem.protocol.messages import RoutedEvent
from tandem.worker.scheduler import StepScheduler


class VirtualStepLoop:
    """Runs both halves on a simulated device; runs of equal decode steps are taken at once."""

    def __init__(
        self,
        clock: VirtualClock,
        scheduler: StepScheduler,
        truth: StepCost,
        *,
        decode: SteadyDecodeHalf,
        prefill: PrefillHalf,
        spare_pages: Callable[[], int],
        publish: Callable[[int, StepWork, Sequence[RoutedEvent], DecodedStep | None], None],
        on_progress: Callable[[], None],
        jumps: bool,
    ) -> None:
        """Sets the loop up; `truth` predicts the durations of steps.

        `publish` receives each completed step with its number in the log, except for those taken at once. `on_progress`
        is called when the prefill half may have progressed. `spare_pages` returns the pages that answers may grow into.
        Without `jumps` every step is taken by itself.
        """
        self._clock, self._scheduler, self._jumps = clock, scheduler, jumps
        self._decode, self._prefill, self._spare_pages = decode, prefill, spare_pages
        self._publish, self._on_progress = publish, on_progress
        self._flights = Flights(truth)
        self.log = self._flights.log
        self._steady: SteadyRun | None = None
        self._plan_number = 0
        self._awaited = False
        """True if the clock will call at the end of the running step."""
        self._woken = False
        self._inside = False

    def wake(self) -> None:
        """Notes that there may be work."""
        self._woken = True

    def visit(self) -> AbstractContextManager[None]:
        """Returns a context for changes of the worker from outside of a step."""
        return _Visit(self)

    @property
    def idle(self) -> bool:
        """True if no step is in flight."""
        return self._flights.none

    @property
    def busy_s(self) -> float:
        """Seconds that the device has computed so far."""
        run = self._steady
        return self._flights.busy_s + (0.0 if run is None else run.seconds(run.over(self._clock.now)))

    @property
    def decoding(self) -> StepWork:
        """The decode rows of the newest step."""
        newest, run = self._scheduler.decoding, self._steady
        return newest if run is None else later(newest, run.over(self._clock.now))

    def catch_up(self) -> None:
        """Applies the ended steps of a steady run, if they have taken pages since.

        Steps that took no pages can be applied later, as no caller sees a difference.
        """
        if self._steady is not None and self._clock.now >= self._steady.turn_s:
            self._pass(self._steady, self._steady.over(self._clock.now))

    def visited(self) -> None:
        """Starts an idle loop after a change, or ends a steady run whose assumptions no longer hold."""
        if self._inside:
            return
        if self.idle and self._woken:
            self._inside = True
            self._step()
            self._on_progress()
            self._inside = False
        run = self._steady
        if run is not None and (self._newcomers or self._spare_pages() <= run.ahead.needed):
            self._pass(run, run.over(self._clock.now))
        if not self._awaited:
            self._wait()

    def _step(self) -> None:
        """Launches until one step runs and another one is behind it, or nothing is left to launch."""
        while not self._flights.push(self._launch()):
            pass

    def _launch(self) -> Flight | None:
        planned = self._scheduler.plan()
        if planned is None:
            return None
        chunks = [None if row.draw is None else 0 for row in planned.batch.chunks]
        return self._flights.launch(
            planned.work, [*[0] * len(planned.batch.tokens), *chunks], self._clock.now, planned.drafting_s
        )

    def _finish(self, number: int, flight: Flight) -> None:
        """Applies a completed step, given its number in the log."""
        events, decoded = self._scheduler.apply(flight.work, ModelRunnerOutput(flight.drawn))
        self._prefill.deliver_updates()
        self._publish(number, flight.work, events, decoded)

    def _on_time(self, plan_number: int) -> None:
        """Handles the awaited end of a step or of a steady run; ignored if planned anew since."""
        if plan_number != self._plan_number:
            return
        self._inside = True
        if self._steady is not None:
            self._pass(self._steady, self._steady.ahead.steps)
        landed = self._flights.land()
        if landed is not None:
            self._finish(*landed)
        self._step()
        self._decode.learn()
        self._on_progress()
        self._inside = False
        self._wait()

    def _wait(self) -> None:
        """Plans the next end to wait for."""
        self._plan_number += 1
        self._steady = self._woken_steady()
        flight = self._flights.first
        self._awaited = flight is not None
        if flight is None:
            return
        end_s = flight.end_s if self._steady is None else float(self._steady.ends_s[self._steady.ahead.steps])
        self._clock.at(end_s, partial(self._on_time, self._plan_number))

    def _woken_steady(self) -> SteadyRun | None:
        """Returns the run of equal steps from here on; None if there is none."""
        self._woken = False
        if not self._jumps or not self._flights.only_decode or self._newcomers:
            return None
        return self._flights.steady(self._decode.look_ahead(self._spare_pages()))

    @property
    def _newcomers(self) -> bool:
        """True if requests wait to join a step."""
        return bool(self._decode.ready_requests or self._prefill.waiting().prompts)

    def _pass(self, run: SteadyRun, steps: int) -> None:
        """Applies the next steps of the steady run."""
        self._steady, self._awaited = None, False
        newest = self._flights.skip(run, steps)
        if newest is not None:
            self._decode.pass_steps(steps)
            self._scheduler.decoding = newest


class _Visit(AbstractContextManager[None]):
    """A call from outside: applies the steps that have ended, then plans anew."""

    def __init__(self, loop: VirtualStepLoop) -> None:
        self._loop = loop

    def __enter__(self) -> None:
        self._loop.catch_up()

    def __exit__(self, *_: object) -> None:
        self._loop.visited()
