"""A worker's step loop under the virtual clock.

As in `worker/loop.py` a step is planned and launched while the one before it runs. Whoever calls in from outside finds
the worker where it is at that moment: steps that were taken at once are caught up with first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

from costs.step_cost import StepCost, StepWork
from engine.steps.batch import StepResult
from prefill_worker.half import PrefillHalf
from simulation.clock import VirtualClock
from simulation.flights import Flight, Flights
from simulation.steady import SteadyDecodeHalf, SteadyRun, later
from wire.messages import RoutedEvent
from worker.scheduler import StepScheduler


class VirtualStepLoop:
    """Runs a device that only takes time for both halves; decode steps that are alike it takes at once."""

    def __init__(
        self,
        clock: VirtualClock,
        scheduler: StepScheduler,
        truth: StepCost,
        *,
        decode: SteadyDecodeHalf,
        prefill: PrefillHalf,
        spare_pages: Callable[[], int],
        publish: Callable[[int, StepWork, Sequence[RoutedEvent]], None],
        on_progress: Callable[[], None],
        jumps: bool,
    ) -> None:
        """`truth`: what steps take. `publish` hears of each step that has ended, but for those taken at once, with its
        number in the log; `on_progress`, that the prefill half may be further. `spare_pages` are those that answers
        may grow into. Without `jumps` every step is taken by itself.
        """
        self._clock, self._scheduler, self._jumps = clock, scheduler, jumps
        self._decode, self._prefill, self._spare_pages = decode, prefill, spare_pages
        self._publish, self._on_progress = publish, on_progress
        self._flights = Flights(truth)
        self.log = self._flights.log
        self._steady: SteadyRun | None = None
        self._plan_number = 0
        self._awaited = False
        """Whether the clock calls at the end of what runs."""
        self._woken = False
        self._inside = False

    def wake(self) -> None:
        """There may be work."""
        self._woken = True

    def visit(self) -> AbstractContextManager[None]:
        """For who acts inside of the worker, but not from a step."""
        return _Visit(self)

    @property
    def idle(self) -> bool:
        return self._flights.none

    @property
    def busy_s(self) -> float:
        """Time of the device so far."""
        run = self._steady
        return self._flights.busy_s + (0.0 if run is None else run.seconds(run.over(self._clock.now)))

    @property
    def decoding(self) -> StepWork:
        """The decode rows of the newest step."""
        newest, run = self._scheduler.decoding, self._steady
        return newest if run is None else later(newest, run.over(self._clock.now))

    def catch_up(self) -> None:
        """Who comes finds the pages as they are by now; the rest of the steps that have ended can wait until something
        of it matters.
        """
        if self._steady is not None and self._clock.now >= self._steady.turn_s:
            self._pass(self._steady, self._steady.over(self._clock.now))

    def visited(self) -> None:
        """Somebody was here: begin, if there was nothing to do, else see whether the steps to come are still alike."""
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
        """Launch until one step runs and another one waits behind it, or nothing is left to launch."""
        while not self._flights.push(self._launch()):
            pass

    def _launch(self) -> Flight | None:
        planned = self._scheduler.plan()
        if planned is None:
            return None
        chunks = [None if row.draw is None else 0 for row in planned.batch.chunks]
        return self._flights.launch(planned.work, [*[0] * len(planned.batch.tokens), *chunks], self._clock.now)

    def _finish(self, number: int, flight: Flight) -> None:
        """A step has ended, by its number in the log."""
        news = self._scheduler.apply(flight.work, StepResult(flight.drawn))
        self._prefill.deliver_updates()
        self._publish(number, flight.work, news.events)

    def _on_time(self, plan_number: int) -> None:
        """What was waited for has happened."""
        if plan_number != self._plan_number:
            return
        self._inside = True
        if self._steady is not None:
            self._pass(self._steady, self._steady.ahead.steps)
        landed = self._flights.land()
        if landed is not None:
            self._finish(*landed)
        self._step()
        self._on_progress()
        self._inside = False
        self._wait()

    def _wait(self) -> None:
        """Plan when to look again."""
        self._plan_number += 1
        self._steady = self._woken_steady()
        flight = self._flights.first
        self._awaited = flight is not None
        if flight is None:
            return
        end_s = flight.end_s if self._steady is None else float(self._steady.ends_s[self._steady.ahead.steps])
        self._clock.at(end_s, partial(self._on_time, self._plan_number))

    def _woken_steady(self) -> SteadyRun | None:
        """What can be taken at once from here."""
        self._woken = False
        if not self._jumps or not self._flights.only_decode or self._newcomers:
            return None
        return self._flights.steady(self._decode.look_ahead(self._spare_pages()))

    @property
    def _newcomers(self) -> bool:
        """Whether somebody waits to be in a step."""
        return bool(self._decode.ready_requests or self._prefill.waiting().prompts)

    def _pass(self, run: SteadyRun, steps: int) -> None:
        """The next steps of the steady run are over."""
        self._steady, self._awaited = None, False
        newest = self._flights.skip(run, steps)
        if newest is not None:
            self._decode.pass_steps(steps)
            self._scheduler.decoding = newest


class _Visit(AbstractContextManager[None]):
    """A call from outside: what has ended by now has, and what comes next is planned anew."""

    def __init__(self, loop: VirtualStepLoop) -> None:
        self._loop = loop

    def __enter__(self) -> None:
        self._loop.catch_up()

    def __exit__(self, *_: object) -> None:
        self._loop.visited()
