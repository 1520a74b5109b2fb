"""The step loop: schedule, launch, postprocess, on its own thread, which waits only for requests and for the engine.

If the engine is asynchronous, a step is scheduled and launched while the previous step still runs: the schedulers plan
it without the previous step's tokens, which they get one step late. The sampling of a step with grammars is launched
when they have got them.

`scheduler.py` decides which rows are in a step. A device can hang, and a thread that waits for a device cannot be
ended: the watchdog abandons such a step with `abandon_stuck_step`, and ends the process.
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
"""The interval at which `stop` checks whether the thread is stuck, in seconds."""


@dataclass(frozen=True, slots=True)
class _Step:
    """A launched step. Its first `work.decode_rows` rows belong to the decode phase."""

    result: PendingStep
    work: StepWork
    began: float
    """The start of the step by the meter's clock."""
    scored_tokens: int
    """Number of prompt tokens whose log probabilities are computed."""


class StepMeter:
    """Measures the duration of steps and fits the cost model. Engine thread only; any thread may read `parameters`.

    A step is measured from the results of the previous step, because the time between two results is the time between
    tokens. After an idle time, a step is measured from the start of its scheduling. Owned by the worker.
    """

    def __init__(
        self,
        guess: CostParameters,
        clock: Callable[[], float] = time.perf_counter,
        on_step: Callable[[StepWork, float, float], None] = lambda _work, _seconds, _predicted_s: None,
    ) -> None:
        """Create the meter; `guess` has the cost parameters to begin with, `clock` returns seconds.

        `on_step` is called for each step with its work, its measured seconds and its predicted seconds.
        """
        self._fit = StepFit(guess)
        self._clock = clock
        self.on_step = on_step
        self._last_end = float("-inf")
        self._ended: list[tuple[StepWork, float]] = []
        """Steps that the cost model has not been fitted to yet, each with its seconds."""

    @property
    def parameters(self) -> CostParameters:
        """The coefficients of the cost model from its newest fit, and the error of that fit."""
        return self._fit.parameters

    def cost(self) -> StepCost:
        """Return the cost model with the newest fit."""
        return StepCost(self._fit.parameters)

    def begin(self) -> float:
        """Return the current time, to be passed to `end`."""
        return self._clock()

    def end(self, work: StepWork, began: float, *, scored: bool = False) -> float:
        """Record a step whose results have arrived, and return its duration in seconds.

        A step that scores prompts (`scored`) takes longer, so the cost model is not fitted to it.
        """
        now = self._clock()
        seconds, self._last_end = now - max(began, self._last_end), now
        if not scored:
            self._ended.append((work, seconds))
        return seconds

    def learn(self) -> None:
        """Fit the cost model to the steps that have ended.

        Call it between steps, when no router waits for their output.
        """
        for work, seconds in self._ended:
            self.on_step(work, seconds, self._fit.observe(work, seconds))
        self._ended.clear()


class StepLoop:
    """Runs the engine's steps for both schedulers until `stop`, or until a step fails; `on_death` then gets the error.

    Owned by the worker; it has its own thread, the engine thread.
    """

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
        batch_wait_s: float = 0.0,
        publish: Callable[[int, Sequence[RoutedEvent], Sequence[RoutedTokens], Sequence[Callable[[], None]]], None],
        on_death: Callable[[BaseException], None],
    ) -> None:
        """Create the loop.

        `deadline_s` limits a step, from its schedule to its result; a longer step counts as stuck. `batch_wait_s` is
        the time in seconds that an idle loop waits for more prompts before it computes the first. `publish` and
        `on_death` are called on the loop's thread and return immediately. `publish` passes a step's number, events,
        tokens and a list of calls to the event loop, which sends the events and tokens and then makes the calls.
        """
        self._runner = runner
        self._decode = decode
        self._prefill = prefill
        self._scheduler = StepScheduler(
            decode=decode, prefill=prefill, max_step_tokens=max_step_tokens, cost=meter.cost, assignment=assignment
        )
        self._meter = meter
        self._deadline_s = deadline_s
        self._batch_wait_s = batch_wait_s
        self._publish = publish
        self._on_death = on_death
        self._work = threading.Event()
        self._publish_lock = threading.Lock()
        """Held while results are applied and published; an abandoned thread that continues later does neither."""
        self._busy_since: float | None = None
        self._stopping = False
        self._abandoned = False
        self._running: _Step | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.steps = 0
        """The number of steps that have ended."""

    @property
    def decoding(self) -> StepWork:
        """The decode rows of the newest step."""
        return self._scheduler.decoding

    def set_assignment(self, assignment: Assignment) -> None:
        """Apply this assignment from the next step on. Any thread may call it."""
        self._scheduler.set_assignment(assignment)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Notify the loop of possible work: a request was queued, or pages became free. Any thread may call it."""
        self._work.set()

    def stop(self) -> None:
        """Stop the loop after the step in flight; return when the thread has ended or was abandoned. Idempotent."""
        self._stopping = True
        self._work.set()
        while self._thread.is_alive() and not self.abandon_stuck_step():
            self._thread.join(_JOIN_S)

    def abandon_stuck_step(self) -> bool:
        """Abandon the step in flight if it exceeds the deadline; return True if a step was abandoned, now or before.

        The step and the thread publish nothing from then on. The memory that the step may still write to must not be
        used again. Any thread may call it.
        """
        with self._publish_lock:
            began = self._busy_since
            if began is not None and time.monotonic() - began > self._deadline_s:
                self._abandoned = self._stopping = True
            return self._abandoned

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
            if not self._abandoned:
                self._on_death(error)
        finally:
            self._busy_since = None

    def _begin(self) -> bool:
        """Record the start of an iteration, and return True if the loop continues."""
        with self._publish_lock:
            self._busy_since = time.monotonic()
            return not self._stopping

    def _gather(self) -> None:
        """Wait `batch_wait_s` seconds for prompts to share a step, if a prompt is queued and no request decodes."""
        if self._batch_wait_s > 0.0 and self._prefill.queue.length and not self._decode.running_requests():
            time.sleep(self._batch_wait_s)

    def _step(self) -> bool:
        """Launch the next step and postprocess a step that has ended; return False if there was neither.

        If the engine is asynchronous, the ended step is the previous one, otherwise the launched one.
        """
        launched = finished = self._launch()
        if self._runner.asynchronous:
            finished, self._running = self._running, launched
            if finished is None and launched is not None:
                launched.result.draw()
        if finished is not None:
            self._postprocess(finished, waited=self._runner.asynchronous and launched is None)
        return launched is not None or finished is not None

    def _launch(self) -> _Step | None:
        """Launch the next step with the rows of both phases; return None if there are no rows."""
        began = self._meter.begin()
        planned = self._scheduler.plan()
        if planned is None:
            return None
        batch = planned.batch
        return _Step(self._runner.launch(batch), planned.work, began + planned.drafting_s, batch.scored_tokens)

    def _postprocess(self, step: _Step, *, waited: bool) -> None:
        """Pass a step's results to the schedulers and publish them.

        `waited` is True if the next step has not been launched yet, because its plan needs these results; it is then
        launched before they are published.
        """
        result = step.result()
        seconds = self._meter.end(step.work, step.began, scored=step.scored_tokens > 0)
        if step.scored_tokens:
            self._prefill.scored_tokens.observe(step.scored_tokens, seconds)
        with self._publish_lock:
            if self._abandoned:
                return
            self.steps += 1
            events, decoded = self._scheduler.apply(step.work, result)
            updates = self._prefill.take_updates() if step.work.prefill_tokens else ()
        # Launched before this step's tokens are published, so that the device does not wait for that.
        if waited:
            self._running = self._launch()
        if self._running is not None:
            self._running.result.draw()
        with self._publish_lock:
            if not self._abandoned:
                tokens = () if decoded is None else decoded.plain_tokens()
                self._publish(self.steps, events, tokens, updates)
