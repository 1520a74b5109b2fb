"""One request through the router: queue, place, reserve on the decode worker, prefill. How it ends is in `ends.py`.

The request's queues, in order:
1. waiting: admitted, in the queue (scheduler.py) until a worker has capacity.
2. walking: Reserve and Prefill are on their way (walk.py), one short task a request.
3. placed: the workers have it; their events (stream.py) carry it on until it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator

from router.config import RouterConfig
from router.observability.prediction_quality import PredictionQuality
from router.placement.policy import Placement, PlacementPolicy
from router.placement.queue import QueuedRequest
from router.placement.scheduler import RequestScheduler, record
from router.requests.choices import Choices
from router.requests.ends import RequestEnds
from router.requests.live_requests import LiveRequests
from router.requests.metrics import RouterMetrics
from router.requests.request import Admitted, RoutedRequest
from router.requests.stream import EventStream
from router.requests.sweeper import Sweeper
from router.requests.worker_calls import Walks
from router.text.answer_text import TokenText
from router.workers.worker_link import WorkerLink
from router.workers.worker_pool import WorkerPool
from wire.errors import InvalidArgument, StaleEpoch, TandemError, Unavailable
from wire.messages import FinishReason, Lease, StepEvents
from wire.mode import Mode
from wire.tracing.timeline import Edge, EdgeStamp

log = logging.getLogger(__name__)

_SHORTEST = QueuedRequest("", 0, 0.0, prompt_tokens=1, max_tokens=2)
"""A request that every worker is large enough for."""


class Dispatcher:
    """Owns every request in flight. Belongs to the event loop; `WorkerLink`s report to it (`LinkObserver`)."""

    def __init__(
        self,
        config: RouterConfig,
        policy: PlacementPolicy,
        tokens: TokenText,
        on_readiness: Callable[[], None],
    ) -> None:
        """`tokens` turns token ids into text; `on_readiness` is called when `refusal` may have changed."""
        self._config = config
        self._on_readiness = on_readiness
        self._live = LiveRequests(tokens)
        self._pump_scheduled = False
        self._draining = False
        self._policy = policy
        self.pool = WorkerPool(config, self)
        self._scheduler = RequestScheduler(config, policy, self.pool.fleet, time.monotonic)
        self.prediction_quality = PredictionQuality()
        """How good placement's expectations are."""
        self.metrics = RouterMetrics(config)
        self.metrics.watch(lambda: self.running, lambda: self.waiting)
        self._ends = RequestEnds(
            config,
            self._live,
            self._scheduler,
            incompatible=self.pool.fleet.incompatible,
            prediction_quality=self.prediction_quality,
            metrics=self.metrics,
            pump=self._schedule_pump,
            tell=self._tell,
            forget=self._forget,
        )
        self._walks = Walks(config, self._ends)
        self._events = EventStream(config, self._ends)
        self._sweeper = Sweeper(config, self, self._ends, time.monotonic)

    # ---- what the listeners call ----

    def submit(self, admitted: Admitted) -> Choices:
        """Queue a request and return its answers-to-be; refuses at once when nobody could serve it, the queue is full,
        or what its class promises cannot be held. The caller closes them.
        """
        try:
            return self._submit(admitted)
        except TandemError as error:
            self.metrics.refused(admitted.slo.name, error)
            raise

    def _submit(self, admitted: Admitted) -> Choices:
        if self._live.of_client(admitted.tenant, admitted.request_id):
            raise InvalidArgument("request_id", f"{admitted.request_id!r} is still running here; choose another id")
        if (closed := self._closed()) is not None:
            raise closed
        requests = self._live.make(admitted)
        for request in requests:
            self._connect(request)
        queued = requests[0].queued
        self.metrics.offered(len(requests), queued.prompt_tokens, self._scheduler.answer_tokens(queued))
        held_own = self._live.held_of(admitted.tenant)
        self._scheduler.enter(queued, more=len(requests) - 1, held=self._live.held, held_own=held_own)
        self._live.add(requests)
        self._schedule_pump()
        return Choices([request.answer for request in requests])

    def abort(self, tenant: str, request_id: str) -> bool:
        """End a running request by its client's id: its answer completes with finish reason `abort`."""
        requests = self._live.of_client(tenant, request_id)
        for request in requests[::-1]:
            self._ends.finish(request, FinishReason.ABORT, "")
        return bool(requests)

    @property
    def waiting(self) -> int:
        return len(self._scheduler) + self._live.held

    @property
    def running(self) -> int:
        return len(self._live) - self.waiting

    @property
    def refusal(self) -> Unavailable | None:
        """Why a request, however short, would not be answered now; None = it would. What the queue and the classes
        refuse depends on the request and is not looked at.
        """
        if (closed := self._closed()) is not None:
            return closed
        return None if self._policy.could_serve(_SHORTEST, self.pool.fleet) else self._nobody()

    async def drain(self, grace_s: float) -> None:
        """Take nothing new, let what runs end for `grace_s` seconds, then fail the rest."""
        self._draining = True
        self._on_readiness()
        if self._live and grace_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self._live.until_empty()
        for request in list(self._live.values()):
            self._ends.fail(request, self._leaving())

    async def close(self) -> None:
        """Fail what still runs, abort it on the workers, and close every connection."""
        await self.drain(0.0)
        await self._sweeper.close()
        await self._walks.close()
        await self.pool.close()
        await self._events.close()

    # ---- queue and placement ----

    def _schedule_pump(self) -> None:
        if not self._pump_scheduled and len(self._scheduler):
            self._pump_scheduled = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        """Bind requests to workers as long as a worker has capacity for the next one."""
        self._pump_scheduled = False
        if not self.pool.staffed:
            for request in list(self.waiting_requests()):
                self._ends.fail(request, self._nobody())
        while (queued := self._scheduler.head()) is not None:
            request = self._live[queued.wire_id]
            try:
                goes_on = self._bind(request)
            except Exception as error:
                # It is at the head of the queue: left there, it would keep everybody behind it waiting.
                self._ends.break_off(request, error)
                goes_on = self._scheduler.head() is not queued
            if not goes_on:
                return

    def _bind(self, request: RoutedRequest) -> bool:
        """Place the request whose turn it is, or set it aside; False = nobody behind it has a turn now."""
        queued = request.queued
        # Not before now: the largest prefill worker may have died while the request waited.
        room = max(0, self.pool.prefill_room - queued.prompt_tokens)
        queued.answered = min(request.assembler.count, room)
        placement = self._scheduler.bind(queued)
        if placement is None:
            return self._scheduler.skip_hopeless(queued)
        self._place(request, placement)
        return True

    def _place(self, request: RoutedRequest, placement: Placement) -> None:
        request.edges.append(EdgeStamp.now(Edge.PLACED))
        request.last_heard = request.placed_s = time.monotonic()
        request.first_token_s = 0.0
        request.prediction = placement.prediction
        request.pace.target_s = self._gap_target(request, placement)
        request.prefill = self.pool.link(placement.prefill)
        request.decode = None if placement.decode is None else self.pool.link(placement.decode)
        request.prefill_worker = placement.prefill.worker_id
        request.decode_worker = "" if placement.decode is None else placement.decode.worker_id
        decode = None if request.decode is None else request.decode.state
        record(request.queued, placement, request.prefill.state, decode)
        self._walks.start(request)

    def _gap_target(self, request: RoutedRequest, placement: Placement) -> float:
        """What its class promises between tokens on these workers, in seconds."""
        state = self.pool.link(placement.decode or placement.prefill).state
        return request.admitted.slo.gap_target(state.idle_step_s)

    def waiting_requests(self) -> Iterator[RoutedRequest]:
        """Those in the queue."""
        return (self._live[queued.wire_id] for queued in self._scheduler)

    def live_requests(self) -> Iterable[RoutedRequest]:
        """All of them."""
        return self._live.values()

    def swept(self) -> None:
        """As load reports grow old, waiting requests may have a place."""
        self.pool.sweep()
        self._schedule_pump()

    # ---- what links report ----

    def on_step(self, _link: WorkerLink, step: StepEvents) -> None:
        self._events.take(step, self._live)
        self._schedule_pump()

    def on_lost(self, link: WorkerLink) -> None:
        lost = Unavailable(
            f"{link.name} went away while it served the request; send it again",
            retry_after_s=self._config.retry_after_s,
        )
        elsewhere = self.pool.staffed
        for request_id in link.request_ids:
            request = self._live.get(request_id)
            if request is None:
                continue
            try:
                self._ends.fail_attempt(request, lost, retry=elsewhere)
            except Exception as error:
                self._ends.break_off(request, error)

    def on_lease_lost(self, link: WorkerLink, lease: Lease) -> None:
        request = self._live.get(lease.request_id)
        if request is not None and request.lease == lease and request.decode is link:
            self._ends.fail_attempt(
                request, StaleEpoch(f"{link.name} dropped the lease before the transfer was complete")
            )

    def on_mode(self, mode: str) -> None:
        try:
            self._policy.change_mode(Mode(mode))
        except ValueError:
            log.error("the controller asks for mode %r, which this router does not know: start both anew", mode)
        else:
            log.info("the cluster's mode is %s now", mode)

    def on_change(self) -> None:
        self._schedule_pump()
        self._on_readiness()

    # ---- small parts ----

    def _connect(self, request: RoutedRequest) -> None:
        request.answer.connect(
            leave=lambda tokens: self._leave(request, tokens),
            close=lambda: self._close(request),
        )

    def _leave(self, request: RoutedRequest, tokens: int) -> None:
        """A piece of its answer is on its way to the client."""
        if tokens and not request.pace.tokens:
            request.edges.append(EdgeStamp.now(Edge.FIRST_TOKEN))
        gap_s = self.metrics.tokens_leave(request, tokens)
        handed_over = request.pace.tokens - tokens <= request.answered + 1
        if gap_s is not None and not handed_over and request.answer.at_once and request.decode is not None:
            request.decode.state.observe_gap(gap_s)

    def _close(self, request: RoutedRequest) -> None:
        """Its reader is gone."""
        self._ends.finish(request, FinishReason.ABORT, "")
        self.metrics.left(request)

    def _tell(self, request: RoutedRequest, error: TandemError) -> None:
        """How it ends, behind what is on its way."""
        self._events.fail(request, error)

    def _forget(self, request: RoutedRequest) -> None:
        """It is over."""
        self._events.forget(request)

    def _closed(self) -> Unavailable | None:
        """Why nothing new is taken, None if it is."""
        if self._draining:
            return self._leaving()
        return None if self.pool.ready else self._nobody()

    def _leaving(self) -> Unavailable:
        message = "the router is shutting down; send the request again"
        return Unavailable(message, retry_after_s=self._config.retry_after_s)

    def _nobody(self) -> Unavailable:
        missing = "decode" if any(view.prefills for view in self.pool.views()) else "prefill"
        message = f"no {missing} worker is serving now; try again in a moment"
        if misfit := self.pool.misfit:
            message = misfit
        elif self.pool.staffed:
            message = "; ".join(self.pool.not_ready) or f"mode {self.pool.mode} lets no live worker answer; change it"
        return Unavailable(message, retry_after_s=self._config.retry_after_s)
