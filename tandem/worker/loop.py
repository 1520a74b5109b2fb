"""The step loop: schedule, launch, postprocess; on a thread of its own that waits only for work and for the engine.

Where the engine is asynchronous, a step is scheduled and launched while the one before it still runs: the halves plan
with what is certain, and receive a step's tokens one step late.

`scheduler.py` decides what is in a step. A device can hang, and a thread that waits for one cannot be ended: the
watchdog gives up such a step with `give_up_stuck`, and ends the process.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from decode_worker.scheduler import DecodeScheduler
from prefill_worker.scheduler import PrefillScheduler
from tandem.cost_model.step_cost import CostParameters, StepCost
from tandem.cost_model.step_fit import StepFit
from tandem.cost_model.step_work import StepWork
from tandem.engine.steps.batch import PendingStep
from tandem.protocol.messages import Assignment, RoutedEvent, RoutedTokens
from tandem.worker.loaded_engine import Runner
from tandem.worker.scheduler import StepScheduler

_JOIN_S = 0.1
"""The interval at which `stop` checks whether the thread is stuck."""


@dataclass(frozen=True, slots=True)
class _Step:
    """A launched step; its first `work.decode_rows` rows belong to the decode half."""

    result: PendingStep
    work: StepWork
    began: float
    """The begin of the step by the meter's clock."""
    scored_tokens: int


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

    def end(self, work: StepWork, began: float, *, scored: bool = False) -> float:
        """Note a step whose results are here, and return its seconds.

        One that scores prompts takes longer, and the cost model learns nothing from it.
        """
        now = self._clock()
        seconds, self._last_end = now - max(began, self._last_end), now
        if not scored:
            self._ended.append((work, seconds))
        return seconds

    def learn(self) -> None:
        """Learn from the steps that have ended. It belongs between steps, when no router waits for their output."""
        for work, seconds in self._ended:
            self.on_step(work, seconds, self._fit.observe(work, seconds))
        self._ended.clear()


class StepLoop:
    """Runs the engine for both halves until `stop`, or until a step fails: a defect that is passed to `on_death`."""

    def __init__(
        self,
        runner: Runner,
        *,
        decode: DecodeScheduler,
        prefill: PrefillScheduler,
        max_step_tokens: int,
        assignment: Assignment,
        meter: StepMeter,
        deadline_s: float,
        gather_s: float = 0.0,
        publish: Callable[[int, Sequence[RoutedEvent], Sequence[RoutedTokens], Sequence[Callable[[], None]]], None],
        on_death: Callable[[BaseException], None],
    ) -> None:
        """`deadline_s` limits a step, from its schedule to its result: a longer one counts as stuck.

        `gather_s` is the time that an idle loop waits for more prompts before it computes the first, in seconds.
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
        self._publish_lock = threading.Lock()
        """Held while results are applied and published: a thread that returns after it was given up does neither."""
        self._busy_since: float | None = None
        self._stopping = False
        self._given_up = False
        self._running: _Step | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.steps = 0
        """The number of steps that have ended."""

    @property
    def decoding(self) -> StepWork:
        """The decode rows of the newest step."""
        return self._scheduler.decoding

    def set_assignment(self, assignment: Assignment) -> None:
        """Follow this assignment from the next step on. Any thread may call it."""
        self._scheduler.set_assignment(assignment)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Notify the loop of possible work: a request was queued, or pages became free. Any thread may call it."""
        self._work.set()

    def stop(self) -> None:
        """End after the step in flight; returns when the thread has ended or was given up. Idempotent."""
        self._stopping = True
        self._work.set()
        while self._thread.is_alive() and not self.give_up_stuck():
            self._thread.join(_JOIN_S)

    def give_up_stuck(self) -> bool:
        """Return True if a step exceeds the deadline.

        That step and the thread publish nothing from then on; the memory that the step may still write to must not be
        used again. Any thread may call it.
        """
        with self._publish_lock:
            began = self._busy_since
            if began is not None and time.monotonic() - began > self._deadline_s:
                self._given_up = self._stopping = True
            return self._given_up

    def _run(self) -> None:
        try:
            while self._begin():
                # Cleared before the step looks for work, so that a request queued meanwhile wakes the loop again.
                self._work.clear()
                if self._step():
                    self._decode.learn()
                    self._meter.learn()
                else:
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
        """Return True if the loop goes on."""
        with self._publish_lock:
            self._busy_since = time.monotonic()
            return not self._stopping

    def _gather(self) -> None:
        """Have the first prompt of a burst wait some milliseconds for the others to share its step, if none decodes."""
        if self._gather_s > 0.0 and self._prefill.queue.length and not self._decode.running_requests():
            time.sleep(self._gather_s)

    def _step(self) -> bool:
        """Launch a step and postprocess the one that has ended; returns False if there was nothing to do."""
        launched = finished = self._launch()
        if self._runner.asynchronous:
            finished, self._running = self._running, launched
        if finished is not None:
            self._postprocess(finished, waited=self._runner.asynchronous and launched is None)
        return launched is not None or finished is not None

    def _launch(self) -> _Step | None:
        """Launch the next step over both halves' rows, if there are any."""
        began = self._meter.begin()
        planned = self._scheduler.plan()
        if planned is None:
            return None
        batch = planned.batch
        return _Step(self._runner.launch(batch), planned.work, began + planned.drafting_s, batch.scored_tokens)

    def _postprocess(self, step: _Step, *, waited: bool) -> None:
        """Hand a step's results back and publish them, once the next step is launched if that `waited` for them."""
        result = step.result()
        seconds = self._meter.end(step.work, step.began, scored=step.scored_tokens > 0)
        if step.scored_tokens:
            self._prefill.scored_tokens.observe(step.scored_tokens, seconds)
        with self._publish_lock:
            if self._given_up:
                return
            self.steps += 1
            events, decoded = self._scheduler.apply(step.work, result)
            updates = self._prefill.take_updates() if step.work.prefill_tokens else ()
        if waited:
            self._running = self._launch()
        with self._publish_lock:
            if not self._given_up:
                tokens = () if decoded is None else decoded.plain_tokens()
                self._publish(self.steps, events, tokens, updates)
