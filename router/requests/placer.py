"""Takes requests from the queue: places each on workers as soon as they have capacity, and starts its calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from router.placement.fleet import Fleet
from router.placement.policy import Placement
from router.placement.scheduler import RequestScheduler, record
from router.placement.worker_state import Clock
from router.requests.ends import RequestEnds
from router.requests.live_requests import LiveRequests
from router.requests.request import RoutedRequest
from router.workers.worker import Worker
from tandem.protocol.errors import TandemError
from tandem.protocol.lifecycle.events import EventTime, LifecycleEvent
from tandem.protocol.messages import PeerRef


class RequestPlacer:
    """Places waiting requests in the order of the queue, until no worker has capacity for the next one.

    The dispatcher, real or simulated, owns it; all calls are on the event loop.
    """

    def __init__(
        self,
        live: LiveRequests,
        scheduler: RequestScheduler,
        fleet: Fleet,
        ends: RequestEnds,
        clock: Clock,
        *,
        link: Callable[[PeerRef], Worker],
        start: Callable[[RoutedRequest], None],
        closed: Callable[[], TandemError | None] = lambda: None,
    ) -> None:
        """Set the callbacks.

        `link` returns the worker that placement has chosen, and `start` calls the workers of a placed request. `closed`
        returns the error with which all waiting requests fail, because no worker can serve them now or later; None if
        they may wait.
        """
        self._live, self._scheduler, self._fleet, self._ends = live, scheduler, fleet, ends
        self._clock, self._link, self._start, self._closed = clock, link, start, closed
        self._scheduled = False

    def schedule(self) -> None:
        """Place waiting requests once the current callback of the event loop has ended."""
        if not self._scheduled and len(self._scheduler.queue):
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        self._scheduled = False
        if (closed := self._closed()) is not None:
            for request in [self._live[waiting.internal_id] for waiting in self._scheduler.queue]:
                self._ends.fail(request, closed)
        # The head of the queue is placed or skipped in each iteration, until one must wait.
        while (queued := self._scheduler.head()) is not None:
            request = self._live[queued.internal_id]
            try:
                goes_on = self._bind(request)
            except Exception as error:
                # Left at the head of the queue, the request would block every request after it.
                self._ends.fail_internal(request, error)
                goes_on = self._scheduler.head() is not queued
            if not goes_on:
                return

    def _bind(self, request: RoutedRequest) -> bool:
        """Place the request at the head of the queue, or skip it; return False if the queue must wait."""
        queued = request.queued
        if request.assembler.count:
            # A retry prefills its answer tokens with the prompt, at most as many as the largest prefill worker can
            # hold. The limit is computed here, because that worker may have died while the request waited.
            capacity = max(0, self._fleet.prefill_capacity - queued.prompt_tokens)
            queued.prior_output_tokens = min(request.assembler.count, capacity)
        placement = self._scheduler.bind(queued)
        if placement is None:
            self._read_ahead(request)
            return self._scheduler.may_pass(queued)
        self._place(request, placement)
        return True

    def _read_ahead(self, request: RoutedRequest) -> None:
        """Let a worker load KV of the request at the head of the queue from its tiers, while the request waits."""
        if request.reads_ahead:
            return
        request.reads_ahead = True
        if (target := self._scheduler.read_ahead_target(request.queued)) is not None:
            request.read_ahead(self._link(target))

    def _place(self, request: RoutedRequest, placement: Placement) -> None:
        request.event_times.append(EventTime.now(LifecycleEvent.PLACED))
        request.last_event_s = request.placed_s = self._clock()
        request.first_token_s = 0.0
        request.prediction = placement
        request.prefill = prefill = self._link(placement.prefill)
        request.decode = decode = None if placement.decode is None else self._link(placement.decode)
        request.pace.target_s = request.admitted.slo.itl_target((decode or prefill).state.idle_step_s)
        request.prefill_worker = placement.prefill.worker_id
        request.decode_worker = "" if placement.decode is None else placement.decode.worker_id
        record(request.queued, placement, prefill.state, None if decode is None else decode.state)
        self._start(request)
