"""What time alone brings about: requests that wait or are silent for too long end, reports grow old."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from router.config import RouterConfig
from router.requests.ends import RequestEnds
from router.requests.request import RoutedRequest
from wire.errors import DeadlineExceeded

log = logging.getLogger(__name__)

_SWEEP_S = 0.25


class SweptRequests(Protocol):
    """Whose requests these are: the dispatcher."""

    def waiting_requests(self) -> Iterable[RoutedRequest]:
        """Those in the queue."""

    def live_requests(self) -> Iterable[RoutedRequest]:
        """All of them."""

    def swept(self) -> None:
        """A round is over: what waits may have a place now."""


class Sweeper:
    """A round every quarter of a second. Belongs to the event loop."""

    def __init__(
        self, config: RouterConfig, owner: SweptRequests, ends: RequestEnds, clock: Callable[[], float]
    ) -> None:
        self._config = config
        self._owner = owner
        self._ends = ends
        self._clock = clock
        self._task = asyncio.create_task(self._run(), name="router-sweep")

    async def close(self) -> None:
        """No round follows."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            try:
                self._sweep(self._clock())
            except Exception:
                log.exception("sweeping failed")

    def _sweep(self, now: float) -> None:
        for request in list(self._owner.waiting_requests()):
            self._each(self._end_wait, request, now)
        for request in list(self._owner.live_requests()):
            self._each(self._end_silence, request, now)
        self._owner.swept()

    def _each(self, sweep: Callable[[RoutedRequest, float], None], request: RoutedRequest, now: float) -> None:
        """A request that cannot be swept ends alone: it must not keep the sweep from the others in every round."""
        try:
            sweep(request, now)
        except Exception as error:
            self._ends.break_off(request, error)

    def _end_wait(self, request: RoutedRequest, now: float) -> None:
        if now - request.waiting_since > self._config.queue_timeout_s:
            message = f"no worker had room for {self._config.queue_timeout_s:g} s; try again later"
            self._ends.fail(request, DeadlineExceeded(message, retry_after_s=self._config.retry_after_s))

    def _end_silence(self, request: RoutedRequest, now: float) -> None:
        placed = request.prefill is not None
        if placed and now - request.last_heard > self._config.stall_timeout_s:
            silent = f"{request.prefill_worker} and {request.decode_worker or 'no decode worker'}"
            message = f"the workers ({silent}) were silent for {self._config.stall_timeout_s:g} s; send it again"
            # Once all is generated, its text is late: no worker could help.
            retry = False if request.generated else None
            self._ends.fail_attempt(request, DeadlineExceeded(message), retry=retry)
