"""What a worker looks after beside its steps: leases that end, a device that is stuck, a pool that must be sound."""

import asyncio
import logging
from collections.abc import Callable

from engine.cache.prefix_cache import PrefixCache
from kv_transfer.checksums import PageChecks
from wire.errors import DeadlineExceeded, Internal
from worker.config import WorkerConfig
from worker.halves import Halves
from worker.loop import StepLoop

log = logging.getLogger(__name__)


class Caretaker:
    """A timer on the event loop. Leases, quarantines and stuck steps end at most a tenth of their time late; the pool
    is checked after each busy time.
    """

    def __init__(
        self,
        config: WorkerConfig,
        *,
        loop: StepLoop,
        halves: Halves,
        cache: PrefixCache,
        checks: PageChecks,
        on_stuck: Callable[[BaseException], None],
    ) -> None:
        self._step_deadline_s = config.step_deadline
        self._period_s = max(0.01, min(config.lease_s, config.quarantine_s, config.step_deadline) / 10)
        self._loop = loop
        self._halves = halves
        self._cache = cache
        self._checks = checks
        self._on_stuck = on_stuck
        self._steps_checked = 0
        self._timer: asyncio.Task[None] | None = None
        self.integrity_error = ""
        """What was found wrong with the pool, in words; it stays."""

    def start(self) -> None:
        self._timer = asyncio.ensure_future(self._tend_forever())

    def stop(self) -> None:
        """Idempotent."""
        if self._timer is not None:
            self._timer.cancel()

    async def _tend_forever(self) -> None:
        while True:
            await asyncio.sleep(self._period_s)
            try:
                if stuck := self._stuck():
                    self._on_stuck(DeadlineExceeded(f"{stuck} did not end within {self._step_deadline_s:g} s"))
                    return
                self._halves.admission.expire()
                await self._check_when_idle()
            except Exception:
                log.exception("leases and pages are looked after in spite of an error")

    def _stuck(self) -> str:
        """What the device does not come back from; "" = nothing."""
        if self._loop.give_up_stuck():
            return "a step"
        return "a checksum" if self._checks.busy_s > self._step_deadline_s else ""

    async def _check_when_idle(self) -> None:
        """Not on the event loop, and never while the engine needs the pool."""
        steps = self._loop.steps
        if steps == self._steps_checked or self._halves.open_requests():
            return
        self._steps_checked = steps
        try:
            await asyncio.to_thread(self._cache.check_integrity)
        except Internal as error:
            log.error("%s", error.message)
            self.integrity_error = error.message
