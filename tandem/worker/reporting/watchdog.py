"""The watchdog of a worker: ends expired leases, ends the worker if its device hangs, and checks the page pool."""

import asyncio
import logging
import time
from collections.abc import Callable

from kv_transfer.checksums import PageChecks
from tandem.engine.cache.prefix_cache import PrefixCache
from tandem.protocol.errors import DeadlineExceeded, Internal
from tandem.worker.config import WorkerConfig
from tandem.worker.loop import StepLoop
from tandem.worker.phases import PhaseSchedulers

log = logging.getLogger(__name__)


class Watchdog:
    """A timer on the event loop that checks leases, device and page pool.

    Expired leases, expired quarantines and stuck steps are noticed with a delay of at most a tenth of their time limit.
    The pool is checked whenever the worker becomes idle. Owned by the worker.
    """

    def __init__(
        self,
        config: WorkerConfig,
        *,
        loop: StepLoop,
        schedulers: PhaseSchedulers,
        cache: PrefixCache,
        checks: PageChecks,
        on_stuck: Callable[[BaseException], None],
    ) -> None:
        self._step_deadline_s = config.step_deadline
        self._period_s = max(0.01, min(config.kv_lease_s, config.quarantine_s, config.step_deadline) / 10)
        self._loop = loop
        self._schedulers = schedulers
        self._cache = cache
        self._checks = checks
        self._on_stuck = on_stuck
        self._steps_checked = 0
        self._timer: asyncio.Task[None] | None = None
        self._check: asyncio.Future[None] | None = None
        self._checking_since = 0.0
        """The time at which the running check of the pool began, by the monotonic clock; 0 if none runs."""
        self.integrity_error = ""
        """The error that a check has found in the pool, as text; it is never cleared."""

    def start(self) -> None:
        """Start the periodic checks on the event loop."""
        self._timer = asyncio.ensure_future(self._run())

    def stop(self) -> None:
        """Stop the checks. Idempotent."""
        for task in (self._timer, self._check):
            if task is not None:
                task.cancel()

    def check_device(self) -> bool:
        """Return True if the device hangs; in that case, also end the worker.

        This call must never wait for the device.
        """
        stuck = self._stuck()
        if stuck:
            self._on_stuck(DeadlineExceeded(f"{stuck} did not end within {self._step_deadline_s:g} s"))
        return bool(stuck)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._period_s)
            try:
                if self.check_device():
                    return
                self._schedulers.admission.expire()
                self._check_when_idle()
            except Exception:
                log.exception("the watchdog continues after an error")

    def _stuck(self) -> str:
        """Return the operation in which the device hangs; empty if it does not hang."""
        if self._loop.abandon_stuck_step():
            return "a step"
        if self._checks.busy_s > self._step_deadline_s:
            return "a checksum"
        since = self._checking_since
        return "a check of the pool" if since and time.monotonic() - since > self._step_deadline_s else ""

    def _check_when_idle(self) -> None:
        """Check the page pool in another thread if the worker is idle and has run steps since the last check.

        The timer continues meanwhile: a check that hangs must not hide a device that hangs.
        """
        steps = self._loop.steps
        if steps == self._steps_checked or self._schedulers.open_requests() or self._checking_since:
            return
        self._steps_checked, self._checking_since = steps, time.monotonic()
        self._check = asyncio.ensure_future(self._check_pool())

    async def _check_pool(self) -> None:
        try:
            await asyncio.to_thread(self._cache.check_integrity)
        except Internal as error:
            log.error("%s", error.message)
            self.integrity_error = error.message
        except Exception:
            log.exception("the pool could not be checked")
        finally:
            self._checking_since = 0.0
