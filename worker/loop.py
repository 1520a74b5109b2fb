"""The step loop: schedule, launch, postprocess; on a thread of its own that waits for nothing but work and the engine.

Where the engine is asynchronous, a step is scheduled and launched while the one before it still runs: the halves plan
with what is certain, and hear of a step's tokens one step late.

What is in a step the scheduler says (`scheduler.py`), by what steps have taken until now (`step_meter.py`).

A device can hang, and a thread that waits for one cannot be ended: whoever looks after the worker gives up such a
step with `give_up_stuck`, and ends the process.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from costs.step_cost import StepWork
from decode_worker.half import DecodeHalf
from engine.steps.batch import PendingStep, StepBatch
from prefill_worker.half import PrefillHalf
from wire.messages import Assignment, RoutedEvent, RoutedTokens
from worker.scheduler import StepScheduler
from worker.step_meter import StepMeter

_JOIN_S = 0.1
"""Between two looks at whether a thread that was told to stop is stuck."""


class Runner(Protocol):
    """What the loop asks of an engine."""

    @property
    def asynchronous(self) -> bool: ...

    def launch(self, batch: StepBatch) -> PendingStep: ...


@dataclass(frozen=True, slots=True)
class _Step:
    """A launched step: its first rows are the decode half's, one for each of `work.decode_rows`."""

    result: PendingStep
    work: StepWork
    began: float
    """By the meter's clock."""


class StepLoop:
    """Runs the engine for both halves until `stop` or until a step fails, which is a defect: `on_death` hears of it."""

    def __init__(
        self,
        runner: Runner,
        *,
        decode: DecodeHalf,
        prefill: PrefillHalf,
        max_step_tokens: int,
        assignment: Assignment,
        meter: StepMeter,
        deadline_s: float,
        gather_s: float = 0.0,
        publish: Callable[[int, Sequence[RoutedEvent], Sequence[RoutedTokens], Sequence[Callable[[], None]]], None],
        on_death: Callable[[BaseException], None],
    ) -> None:
        """`deadline_s` is how long a step may take, from its schedule to its result, before it counts as stuck.
        `gather_s` is how long an idle loop waits for more prompts before it computes the first. Both in seconds.

        `publish` and `on_death` are called on the loop's thread and return at once; `publish` has the event loop take a
        step's events and tokens, and then make the calls.
        """
        self._runner = runner
        self._decode = decode
        self._prefill = prefill
        self._scheduler = StepScheduler(
            decode=decode, prefill=prefill, max_step_tokens=max_step_tokens, cost=meter.cost, assignment=assignment
        )
        self._meter = meter
        self._deadline_s = deadline_s
        self._gather_s = gather_s
        self._publish = publish
        self._on_death = on_death
        self._work = threading.Event()
        self._hands = threading.Lock()
        """Held while the halves hear of a step, so that they are never taken from a thread that has come back."""
        self._busy_since: float | None = None
        self._stopping = False
        self._given_up = False
        self._running: _Step | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.steps = 0
        """Engine steps so far."""

    @property
    def decoding(self) -> StepWork:
        """The decode rows of the newest step."""
        return self._scheduler.decoding

    def steer(self, assignment: Assignment) -> None:
        """Plan as this assignment says from the next step on. From any thread."""
        self._scheduler.steer(assignment)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """There may be work: something was queued, or pages became free. From any thread."""
        self._work.set()

    def stop(self) -> None:
        """End after the running step; returns when the thread is gone or given up. Idempotent."""
        self._stopping = True
        self._work.set()
        while self._thread.is_alive() and not self.give_up_stuck():
            self._thread.join(_JOIN_S)

    def give_up_stuck(self) -> bool:
        """Whether the engine has been at one step for longer than the deadline. Nothing more is heard of this step
        then, nor of the thread; what it may still write to must not be used again. From any thread.
        """
        with self._hands:
            began = self._busy_since
            if began is not None and time.monotonic() - began > self._deadline_s:
                self._given_up = self._stopping = True
            return self._given_up

    def _run(self) -> None:
        try:
            while self._begin():
                # Cleared before looking for work, so that what is queued meanwhile wakes the loop again.
                self._work.clear()
                if not self._step():
                    self._busy_since = None
                    self._work.wait()
                    self._gather()
            if self._running is not None:
                self._running.result()
        except BaseException as error:
            if not self._given_up:
                self._on_death(error)
        finally:
            self._busy_since = None

    def _begin(self) -> bool:
        """Whether another step may be looked for."""
        with self._hands:
            self._busy_since = time.monotonic()
            return not self._stopping

    def _gather(self) -> None:
        """The prompts of a burst come within milliseconds: the first waits for the others, and they share its step.

        What decodes never waits.
        """
        if self._gather_s > 0.0 and self._prefill.queue.length and not self._decode.running_requests():
            time.sleep(self._gather_s)

    def _step(self) -> bool:
        """Launch a step, take in what is finished; False when there was nothing to do."""
        launched = finished = self._launch()
        if self._runner.asynchronous:
            finished, self._running = self._running, launched
        if finished is not None:
            self._postprocess(finished)
        return launched is not None or finished is not None

    def _launch(self) -> _Step | None:
        """The next step over both halves' rows, if there are any."""
        began = self._meter.begin()
        planned = self._scheduler.plan()
        if planned is None:
            return None
        return _Step(self._runner.launch(planned.batch), planned.work, began)

    def _postprocess(self, step: _Step) -> None:
        result = step.result()
        seconds = self._meter.end(step.began)
        with self._hands:
            if self._given_up:
                return
            self.steps += 1
            news = self._scheduler.apply(step.work, result)
            updates = self._prefill.take_updates() if step.work.prefill_tokens else ()
            self._publish(self.steps, news.events, news.tokens, updates)
        self._meter.learn(step.work, seconds)
