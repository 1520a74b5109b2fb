"""The step loop: schedule, launch, postprocess; on a thread of its own that waits for nothing but work and the engine.

Where the engine is asynchronous, a step is scheduled and launched while the one before it still runs: the halves plan
with what is certain, and hear of a step's tokens one step late.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from decode_worker.half import DecodeHalf
from engine.batch import PendingStep, StepBatch
from prefill_worker.half import PrefillHalf
from wire.messages import RoutedEvent


class Runner(Protocol):
    """What the loop asks of an engine."""

    @property
    def asynchronous(self) -> bool: ...

    def launch(self, batch: StepBatch) -> PendingStep: ...


@dataclass(frozen=True, slots=True)
class _Step:
    """A launched step: its first rows are the decode half's."""

    result: PendingStep
    decode_rows: int


class StepLoop:
    """Runs the engine for both halves until `stop` or until a step fails, which is a defect: `on_death` hears of it."""

    def __init__(
        self,
        runner: Runner,
        *,
        decode: DecodeHalf,
        prefill: PrefillHalf,
        max_step_tokens: int,
        gather_s: float = 0.0,
        publish: Callable[[int, Sequence[RoutedEvent]], None],
        on_death: Callable[[BaseException], None],
    ) -> None:
        """`gather_s` is how long an idle loop waits for more prompts before it computes the first, in seconds.

        `publish` and `on_death` are called on the loop's thread and return at once."""
        self._runner = runner
        self._decode = decode
        self._prefill = prefill
        self._max_step_tokens = max_step_tokens
        self._gather_s = gather_s
        self._publish = publish
        self._on_death = on_death
        self._work = threading.Event()
        self._stopping = False
        self._running: _Step | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.steps = 0
        """Engine steps so far."""

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """There may be work: something was queued, or pages became free. From any thread."""
        self._work.set()

    def stop(self) -> None:
        """End after the running step; returns when the thread is gone. Idempotent."""
        self._stopping = True
        self._work.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopping:
                # Cleared before looking for work, so that what is queued meanwhile wakes the loop again.
                self._work.clear()
                if not self._step():
                    self._work.wait()
                    self._gather()
            if self._running is not None:
                self._running.result()
        except BaseException as error:
            self._on_death(error)

    def _gather(self) -> None:
        """The prompts of a burst come within milliseconds: the first waits for the others, and they share its step.

        What decodes never waits.
        """
        if self._gather_s > 0.0 and self._prefill.waiting_requests() and not self._decode.running_requests():
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
        decode_rows = self._decode.schedule(self._max_step_tokens)
        prefill_rows = self._prefill.schedule(self._max_step_tokens - len(decode_rows))
        if not decode_rows and not prefill_rows:
            return None
        return _Step(self._runner.launch(StepBatch([*decode_rows, *prefill_rows])), len(decode_rows))

    def _postprocess(self, step: _Step) -> None:
        result = step.result()
        self.steps += 1
        decoded, prefilled = result.split(step.decode_rows)
        events = [
            *self._decode.apply(decoded.token_ids, decoded.logprobs),
            *self._prefill.apply(prefilled.token_ids, prefilled.logprobs),
        ]
        self._publish(self.steps, events)
        self._prefill.announce()
