"""The dispatcher, which takes requests through the router: queue, placement, and the Reserve and Prefill calls.

The queues of a request, in order (its end is in `ends.py`):
1. waiting: the request is admitted and in the queue (`router/placement/scheduler.py`) until `placer.py` places it.
2. dispatching: its Reserve and Prefill calls are in flight (`worker_calls.py`), one short task per request.
3. running: the workers have accepted it, and their step events (`stream.py`) advance it until it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

from router.access.client_call import served_call
from router.config import RouterConfig
from router.observability.prediction_quality import PredictionQuality
from router.observability.request_outcome import JointOutcome
from router.placement.policy import PlacementPolicy
from router.placement.queue import QueuedRequest
from router.placement.scheduler import RequestScheduler
from router.requests.choices import Choices
from router.requests.ends import RequestEnds
from router.requests.live_requests import LiveRequests
from router.requests.metrics import RouterMetrics
from router.requests.placer import RequestPlacer
from router.requests.request import Admitted, RoutedRequest
from router.requests.reuse import ReuseEstimate
from router.requests.slot_shares import SlotShares
from router.requests.stream import EventStream
from router.requests.sweeper import Sweeper
from router.requests.worker_calls import DispatchCalls
from router.text.answer_text import TokenText
from router.workers.recovery import Recovery
from router.workers.worker_link import WorkerLink
from router.workers.worker_pool import WorkerPool
from tandem.metrics import families as f
from tandem.metrics.registry import Facts
from tandem.protocol.errors import InvalidArgument, StaleEpoch, TandemError, Unavailable
from tandem.protocol.lifecycle.events import EventTime, LifecycleEvent
from tandem.protocol.messages import FinishReason, Lease, StepOutput
from tandem.protocol.mode import Mode

log = logging.getLogger(__name__)

_SHORTEST = QueuedRequest("", 0, 0.0, prompt_tokens=1, max_tokens=2)
"""The smallest possible request, which fits every worker."""


class Dispatcher:
    """Owns every request in flight, and connects the queue, placement, the worker links and the answers.

    The router has one. All calls come on the event loop, including those of the `WorkerLink`s, which report to it
    (`LinkObserver`).
    """

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
        self._live = LiveRequests(tokens, time.monotonic)
        self._draining = False
        self._policy = policy
        self.pool = WorkerPool(config, self)
        self._recovery = Recovery(config.recovery_timeout_s, time.monotonic)
        self._scheduler = RequestScheduler(config, policy, self.pool.fleet, time.monotonic)
        self.prediction_quality = PredictionQuality()
        """The accuracy of placement's predictions."""
        self.metrics = RouterMetrics(config)
        self._reuse = ReuseEstimate(self.metrics.turn_gap)
        self._ends = RequestEnds(
            config,
            self._live,
            self._scheduler,
            incompatible=self.pool.fleet.incompatible,
            prediction_quality=self.prediction_quality,
            metrics=self.metrics,
            clock=time.monotonic,
            pump=self._place_waiting,
            send_error=self._send_error,
            forget=self._forget,
        )
        self._slots = SlotShares(policy, self.pool.fleet, self._ends)
        self._calls = DispatchCalls(config, self._ends)
        self._placer = RequestPlacer(
            self._live,
            self._scheduler,
            self.pool.fleet,
            self._ends,
            time.monotonic,
            link=self.pool.link,
            start=self._calls.start,
            closed=lambda: None if self._serves_or_waits else self._no_worker(),
        )
        self._events = EventStream(config, self._ends)
        self.metrics.registry.read(self._facts)
        self._sweeper = Sweeper(config, self, self._ends, time.monotonic)

    # ---- calls of the listeners ----

    def submit(self, *admitted: Admitted) -> Choices:
        """Queue a client's request and return its future answers, which the caller must close.

        Each element of `admitted` is one prompt of the request; all have the same id. Either all are queued or none.
        Raises InvalidArgument if a request with this id is running, Unavailable if no worker can serve the request and
        none is expected, and `Refused` if the queue is full or the request's targets cannot be met.
        """
        try:
            return self._submit(admitted)
        except TandemError as error:
            self.metrics.refused(admitted[0].slo.name, error)
            raise

    def _submit(self, admitted: Sequence[Admitted]) -> Choices:
        first = admitted[0]
        if self._live.of_client(first.tenant, first.request_id):
            raise InvalidArgument("request_id", f"{first.request_id!r} is still running here; choose another id")
        if (closed := self._closed()) is not None:
            raise closed
        joint = JointOutcome(sum(prompt.n for prompt in admitted))
        prompts = [self._live.make(prompt, joint) for prompt in admitted]
        requests = list(chain.from_iterable(prompts))
        for request in requests:
            self._connect(request)
        self._enter([some[0].queued for some in prompts], len(requests), first.tenant, first.n)
        for prompt, some in zip(admitted, prompts, strict=True):
            expected_s = self._reuse.observe(prompt.tenant, prompt.digests, time.monotonic(), prompt.session)
            hinted_s = prompt.cache_retention_s if prompt.hinted_tokens is None else 0.0
            for request in some:
                request.retention_s = max(hinted_s, expected_s)
            self._live.add(some)
        self._place_waiting()
        prompt_tokens = sum(len(prompt.prompt_token_ids) for prompt in admitted)
        served_call().queued(first.request_id, first.model_name(self._config.served.name), prompt_tokens)
        return Choices([request.answer for request in requests])

    def _enter(self, firsts: Sequence[QueuedRequest], answers: int, tenant: str, n: int) -> None:
        """Queue the first answer to each prompt of a request: all of them, or none if one is rejected.

        `answers` is the number of answers to the whole request, `n` the number of answers to one prompt. Raises the
        first rejection.
        """
        held, held_own = self._live.held, self._live.held_of(tenant)
        for queued in firsts:
            self._scheduler.expect_answer(queued)
            self.metrics.offered(n, queued.prompt_tokens, queued.mean_tokens)
        for number, queued in enumerate(firsts):
            try:
                self._scheduler.enter(queued, more=answers - number - 1, held=held, held_own=held_own)
            except TandemError:
                for entered in firsts[:number]:
                    self._scheduler.queue.remove(entered)
                raise

    def abort(self, tenant: str, request_id: str) -> bool:
        """Abort a client's request by its id; return False if there is no request with this id.

        Its answers complete with finish reason `abort`.
        """
        requests = self._live.of_client(tenant, request_id)
        for request in requests[::-1]:
            self._ends.finish(request, FinishReason.ABORT, "")
        return bool(requests)

    @property
    def waiting(self) -> int:
        """Number of requests that are in the queue or held until the first answer to their prompt is admitted."""
        return len(self._scheduler.queue) + self._live.held

    @property
    def running(self) -> int:
        """Number of requests placed on workers."""
        return len(self._live) - self.waiting

    @property
    def refusal(self) -> Unavailable | None:
        """The error with which every new request would be rejected; None if the shortest request could be served.

        The shortest request could be served if a worker takes it now or after a recovery. Rejections by the queue
        limits or by an SLO class depend on the request and are not considered.
        """
        if (closed := self._closed()) is not None or self._recovery.waits:
            return closed
        return None if self._policy.could_serve(_SHORTEST, self.pool.fleet) else self._no_worker()

    @property
    def degraded(self) -> str:
        """The reason why requests wait for a worker that does not serve now; "" if no such worker is awaited."""
        if not self._recovery.waits:
            return ""
        why = "; ".join(self.pool.not_ready) or self._missing()
        return f"{why}; requests wait for {', '.join(sorted(self.pool.coming))}"

    async def drain(self, grace_s: float) -> None:
        """Reject new requests, wait up to `grace_s` seconds for the running ones, then fail the remaining ones."""
        self._draining = True
        self._on_readiness()
        if self._live and grace_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self._live.until_empty()
        for request in list(self._live.values()):
            self._ends.fail(request, self._leaving())

    async def close(self) -> None:
        """Fail all running requests, abort them on the workers, and close every connection."""
        await self.drain(0.0)
        await self._sweeper.close()
        await self._calls.close()
        await self.pool.close()
        await self._events.close()

    # ---- queue and placement ----

    def _place_waiting(self) -> None:
        self._placer.schedule()

    def waiting_requests(self) -> Iterator[RoutedRequest]:
        """Iterate over the requests in the queue."""
        return (self._live[queued.internal_id] for queued in self._scheduler.queue)

    def live_requests(self) -> Iterable[RoutedRequest]:
        """Return all requests that have not ended, waiting or running."""
        return self._live.values()

    def waited_s(self, request: RoutedRequest) -> float:
        """Return the seconds since the request was queued or the last recovery ended, whichever is later.

        During a recovery it is 0, because no request could be served.
        """
        return self._recovery.waited_s(request.waiting_since)

    def swept(self) -> None:
        """Do the work that the sweeper leaves to the end of each sweep.

        Expire old load reports, charge tenants for the tokens of running answers, preempt an answer if a tenant holds
        too many slots, and place waiting requests that fit now.
        """
        self.pool.sweep()
        for request in self._live.values():
            self._scheduler.generated(request.queued, request.assembler.count)
        if (queued := self._scheduler.head()) is not None:
            self._slots.make_room(self._live[queued.internal_id], self._live.values())
        self._place_waiting()
        if self._update_recovery():
            self._on_readiness()

    # ---- observer of the worker links ----

    def on_step(self, _link: WorkerLink, step: StepOutput) -> None:
        """Process one step output of a worker."""
        self._events.take(step, self._live)
        self._place_waiting()

    def on_lost(self, link: WorkerLink) -> None:
        """Retry every request of a worker whose event stream broke.

        The requests fail instead if no other worker is live or expected.
        """
        self._update_recovery()
        self._end_attempts(link, "went away while it served the request", retry=self._serves_or_waits)

    def _leave_silent_workers(self) -> None:
        """Retry the requests of silent workers (those that do not respond) on other workers.

        A request stays where it is if no other worker can serve it.
        """
        for link in self.pool.links:
            if link.silent and link.request_ids:
                self._end_attempts(link, "does not respond", retry=True, where=self._has_other_worker)

    def _has_other_worker(self, request: RoutedRequest) -> bool:
        return self._policy.could_serve(request.queued, self.pool.fleet)

    def _end_attempts(
        self, link: WorkerLink, why: str, *, retry: bool, where: Callable[[RoutedRequest], bool] = lambda _: True
    ) -> None:
        """Fail the current attempt of each request on a worker for which `where` returns True.

        `retry` has the meaning of `RequestEnds.fail_attempt`; `why` is part of the error message and names the worker's
        failure.
        """
        lost = Unavailable(f"{link.name} {why}; send it again", retry_after_s=self._config.retry_after_s)
        for request_id in link.request_ids:
            request = self._live.get(request_id)
            if request is None:
                continue
            try:
                if where(request):
                    self._ends.fail_attempt(request, lost, retry=retry)
            except Exception as error:
                self._ends.fail_internal(request, error)

    def on_lease_lost(self, link: WorkerLink, lease: Lease) -> None:
        """Fail the attempt whose lease the decode worker has lost; a lease of an earlier attempt is ignored."""
        request = self._live.get(lease.request_id)
        if request is not None and request.lease == lease and request.decode is link:
            self._ends.fail_attempt(
                request, StaleEpoch(f"{link.name} dropped the lease before the transfer was complete")
            )

    def on_mode(self, mode: str) -> None:
        """Change the placement mode to `mode`, the value of a `Mode`."""
        try:
            self._policy.mode = Mode(mode)
        except ValueError:
            log.error("unknown mode %r from the controller; run controller and router of the same version", mode)
        else:
            log.info("the cluster's mode is %s now", mode)

    def on_change(self) -> None:
        """Place waiting requests after a change of the workers, and update readiness."""
        self._update_recovery()
        self._leave_silent_workers()
        self._place_waiting()
        self._on_readiness()

    def _update_recovery(self) -> bool:
        """Update whether requests wait for workers that are being replaced; return True if that has changed."""
        changed = self._recovery.update(recovering=self.pool.recovering)
        if changed and self._recovery.waits:
            log.warning("%s", self.degraded)
        return changed

    @property
    def _serves_or_waits(self) -> bool:
        """True if queued requests can be served, either now or once an expected worker is ready."""
        return self.pool.staffed or self._recovery.waits

    # ---- small parts ----

    def _connect(self, request: RoutedRequest) -> None:
        request.answer.connect(
            leave=lambda tokens: self._leave(request, tokens),
            close=lambda: self._close(request),
        )

    def _leave(self, request: RoutedRequest, tokens: int) -> None:
        """Record that the client's reader has taken a chunk of `tokens` tokens from the answer."""
        if tokens and not request.pace.tokens:
            request.event_times.append(EventTime.now(LifecycleEvent.FIRST_TOKEN))
        gap_s = self.metrics.tokens_leave(request, tokens)
        # Only the decode worker's own steps teach the margin: not a gap that contains the hand-over, nor one that
        # batching or a slow reader made longer.
        handed_over = request.pace.tokens - tokens <= request.prior_output_tokens + 1
        if gap_s is not None and not handed_over and request.answer.at_once and request.decode is not None:
            request.decode.state.observe_gap(gap_s)

    def _close(self, request: RoutedRequest) -> None:
        """Abort the request, because its reader has closed the answer."""
        self._ends.finish(request, FinishReason.ABORT, "")
        self.metrics.left(request)

    def _send_error(self, request: RoutedRequest, error: TandemError) -> None:
        """End the request's answer with `error`, after the tokens that are still in the text thread."""
        self._events.fail(request, error)

    def _forget(self, request: RoutedRequest) -> None:
        """Drop the tokens of an ended request that have not been delivered."""
        self._events.forget(request)

    def _facts(self) -> Facts:
        """Return the metrics whose values the dispatcher provides."""
        return {
            f.REQUESTS_RUNNING: self.running,
            f.REQUESTS_WAITING: self.waiting,
            f.DEGRADED: self._recovery.waits,
            f.STALE_EVENTS: self._events.stale,
        }

    def _closed(self) -> Unavailable | None:
        """Return the error with which new requests are rejected now; None if new requests are accepted."""
        if self._draining:
            return self._leaving()
        return None if self.pool.ready or self._recovery.waits else self._no_worker()

    def _leaving(self) -> Unavailable:
        message = "the router is shutting down; send the request again"
        return Unavailable(message, retry_after_s=self._config.retry_after_s)

    def _missing(self) -> str:
        missing = "decode" if any(view.prefills for view in self.pool.views()) else "prefill"
        return f"no {missing} worker is serving now"

    def _no_worker(self) -> Unavailable:
        message = f"{self._missing()}; try again in a moment"
        if misfit := self.pool.misfit:
            message = misfit
        elif self.pool.staffed:
            message = "; ".join(self.pool.not_ready) or f"mode {self.pool.mode} lets no live worker answer; change it"
        return Unavailable(message, retry_after_s=self._config.retry_after_s)
