"""The step loop: schedule, run, postprocess; on a thread of its own that never waits for anything but work."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from decode_worker.half import DecodeHalf
from engine.batch import StepBatch, StepResult
from prefill_worker.half import PrefillHalf
from wire.messages import RoutedEvent


class Runner(Protocol):
    """What the loop asks of an engine."""

    def run(self, batch: StepBatch) -> StepResult: ...


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
        except BaseException as error:
            self._on_death(error)

    def _gather(self) -> None:
        """The prompts of a burst come within milliseconds: the first waits for the others, and they share its step.

        What decodes never waits.
        """
        if self._gather_s > 0.0 and self._prefill.waiting_requests() and not self._decode.running_requests():
            time.sleep(self._gather_s)

    def _step(self) -> bool:
        """One step over both halves' rows; False when there was nothing to do."""
        decode_rows = self._decode.schedule(self._max_step_tokens)
        prefill_rows = self._prefill.schedule(self._max_step_tokens - len(decode_rows))
        if not decode_rows and not prefill_rows:
            return False
        sampled = self._runner.run(StepBatch([*decode_rows, *prefill_rows])).token_ids
        self._postprocess(sampled[: len(decode_rows)], sampled[len(decode_rows) :])
        return True

    def _postprocess(self, decoded: Sequence[int | None], prefilled: Sequence[int | None]) -> None:
        self.steps += 1
        events = [*self._decode.apply(decoded), *self._prefill.apply(prefilled)]
        self._publish(self.steps, events)
        self._prefill.announce()
