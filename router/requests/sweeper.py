"""Periodic timeouts: ends requests that wait too long or whose workers are silent, and expires old load reports."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from router.config import RouterConfig
from router.requests.ends import RequestEnds
from router.requests.request import RoutedRequest
from tandem.protocol.errors import DeadlineExceeded

log = logging.getLogger(__name__)

SWEEP_S = 0.25
"""The pause between two sweeps, in seconds."""


class SweptRequests(Protocol):
    """The interface through which the sweeper sees the requests, implemented by the dispatcher."""

    def waiting_requests(self) -> Iterable[RoutedRequest]:
        """Return the requests in the queue."""

    def live_requests(self) -> Iterable[RoutedRequest]:
        """Return all requests that have not ended, waiting or running."""

    def waited_s(self, request: RoutedRequest) -> float:
        """Return the seconds since the request was queued or the last recovery ended, whichever is later."""

    def swept(self) -> None:
        """Called at the end of each sweep: expire old load reports, and place waiting requests that fit now."""


class Sweeper:
    """Checks the timeouts of all requests every quarter of a second, in a task on the event loop.

    The dispatcher owns it and must `close` it.
    """

    def __init__(
        self, config: RouterConfig, owner: SweptRequests, ends: RequestEnds, clock: Callable[[], float]
    ) -> None:
        self._config = config
        self._owner = owner
        self._ends = ends
        self._clock = clock
        self._task = asyncio.create_task(self._run(), name="router-sweep")

    async def close(self) -> None:
        """Stop the periodic sweep and wait until its task has ended."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                self._sweep(self._clock())
            except Exception:
                log.exception("sweeping failed")

    def _sweep(self, now: float) -> None:
        for request in list(self._owner.waiting_requests()):
            self._each(self._end_wait, request)
        for request in list(self._owner.live_requests()):
            self._each(partial(self._end_silence, now=now), request)
        self._owner.swept()

    def _each(self, sweep: Callable[[RoutedRequest], None], request: RoutedRequest) -> None:
        """Call `sweep` for one request; if it raises, fail the request, because later sweeps would raise as well."""
        try:
            sweep(request)
        except Exception as error:
            self._ends.fail_internal(request, error)

    def _end_wait(self, request: RoutedRequest) -> None:
        # An answer that was preempted for another tenant has no queue timeout: it waits for its own tenant's answers.
        if not request.queued.yielded and self._owner.waited_s(request) > self._config.queue_timeout_s:
            message = f"no worker had capacity for {self._config.queue_timeout_s:g} s; try again later"
            self._ends.fail(request, DeadlineExceeded(message, retry_after_s=self._config.retry_after_s))

    def _end_silence(self, request: RoutedRequest, now: float) -> None:
        placed = request.prefill is not None
        if placed and now - request.last_event_s > self._config.stall_timeout_s:
            silent = f"{request.prefill_worker} and {request.decode_worker or 'no decode worker'}"
            message = f"the workers ({silent}) were silent for {self._config.stall_timeout_s:g} s; send it again"
            # Once all tokens are generated, only their detokenization is late, which a retry cannot help.
            retry = False if request.generated else None
            self._ends.fail_attempt(request, DeadlineExceeded(message), retry=retry)
