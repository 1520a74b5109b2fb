"""The router's connection to one worker process: a channel, an event stream, and the worker's placement state.

The event stream carries all step outputs. If it breaks, the worker cancels every request of this router. A worker that
restarts is a new process with a new connection.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

import grpc.aio

from router.placement.fleet import Fleet
from router.placement.worker_state import BACK_OFF_S, WorkerState
from router.workers.kv_events import KvEventLog
from router.workers.lease_keeper import LeaseKeeper
from router.workers.liveness import LivenessProbe
from router.workers.prefix_feed import PrefixFeed
from tandem.net.rpc import error_of, open_channel
from tandem.protocol import conversion
from tandem.protocol.errors import DeadlineExceeded, TandemError, Unavailable
from tandem.protocol.generated.tandem.v1 import worker_pb2, worker_pb2_grpc
from tandem.protocol.messages import (
    GrantedLease,
    Lease,
    PrefillTask,
    RequestRef,
    Reservation,
    StepOutput,
    WorkerInfo,
)
from tandem.protocol.prefixes import PrefixList, PrefixRun

log = logging.getLogger(__name__)

_RECONNECT_S = (0.05, 1.0)
"""Minimum and maximum pause before the event stream is reopened, in seconds."""
_ABORT_TRIES = 3
"""Maximum number of tries of an Abort call, not counting tries that end with DeadlineExceeded.

After Unavailable the call is not tried again.
"""
_LIST_PAUSE_S = 1.0
"""Pause before a failed ListPrefixes call is retried, in seconds."""

_Reply = TypeVar("_Reply")


class LinkObserver(Protocol):
    """The observer of a worker's events, implemented by the dispatcher. All calls come on the event loop."""

    def on_step(self, link: WorkerLink, step: StepOutput) -> None:
        """Called with each step output of the worker."""

    def on_lost(self, link: WorkerLink) -> None:
        """Called when the event stream has broken: the worker has cancelled or lost every request of this router."""

    def on_lease_lost(self, link: WorkerLink, lease: Lease) -> None:
        """Called when the worker has lost a lease before it admitted the request."""

    def on_change(self) -> None:
        """Called when a worker connects, disconnects, stops responding, responds again or has capacity again."""


class WorkerLink:
    """The connection to one worker process. The `WorkerPool` owns, opens and closes it.

    All calls are on the event loop, where it runs two tasks: the event stream and the liveness probe.
    """

    def __init__(
        self,
        info: WorkerInfo,
        fleet: Fleet,
        observer: LinkObserver,
        *,
        router_id: str,
        token: str,
        rpc_timeout_s: float,
        silence_s: float,
        kv_events: KvEventLog | None = None,
    ) -> None:
        self.connected = False
        self.retired = False
        """True if the worker has left the cluster: it gets no new requests, but its running requests may finish."""
        self.state = WorkerState(info, time.monotonic)
        self._fleet = fleet
        fleet.join(self.state)
        self._prefixes = PrefixFeed(fleet.prefixes, self.state.slot, kv_events)
        self._router_id = router_id
        self._timeout = rpc_timeout_s
        self._observer = observer
        self._channel = open_channel(info.address, token)
        self._stub = worker_pb2_grpc.WorkerStub(self._channel)
        self._aborts: list[RequestRef] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._listing: asyncio.Task[None] | None = None
        self.leases = LeaseKeeper(self._heartbeat, lambda lease: observer.on_lease_lost(self, lease))
        self._probe = LivenessProbe(
            lambda: self._heartbeat((), rpc_timeout_s),
            silence_s,
            needed=self._needs_reply,
            on_change=self._follow_probe,
        )
        self._stream = asyncio.create_task(self._attach_forever(), name=f"attach-{info.peer.worker_id}")
        self._probing = asyncio.create_task(self._probe.run(), name=f"liveness-{info.peer.worker_id}")

    @property
    def info(self) -> WorkerInfo:
        """The worker's latest registration at the controller."""
        return self.state.info

    @property
    def live(self) -> bool:
        """True if the worker may get new requests: it is connected, responds, and neither drains nor has left."""
        return self.connected and not self.silent and not self.retired and self.info.open is not None

    @property
    def silent(self) -> bool:
        """True if the worker is connected but does not respond to heartbeats."""
        return self.connected and self._probe.silent

    @property
    def may_return(self) -> bool:
        """True if the worker serves no new requests now, but will once it connects, responds or is ready again.

        A worker that neither connects nor responds is replaced by its supervisor; one that is not ready lacks pages of
        transfers that have not ended.
        """
        gone = self.retired or self.info.open is None
        return not gone and (not self.live or bool(self.info.not_ready))

    @property
    def request_ids(self) -> set[str]:
        """The internal ids of the requests that still depend on this worker."""
        return self.state.request_ids

    def apply_registration(self, info: WorkerInfo | None) -> None:
        """Apply the controller's latest registration of the worker; None means that the worker has left the cluster."""
        if info is not None:
            self.state.update(info)
        self.retired = info is None
        self._fleet.set_live(self.state, live=self.live)

    def keep_lease(self, granted: GrantedLease) -> None:
        """See `Worker`."""
        self.leases.keep(granted)

    def drop_lease(self, request_id: str) -> None:
        """See `Worker`."""
        self.leases.drop(request_id)

    def back_off(self) -> None:
        """Stop placing requests on the worker for `BACK_OFF_S`, because it refused one."""
        self.state.back_off()
        asyncio.get_running_loop().call_later(BACK_OFF_S, self._observer.on_change)

    # ---- calls ----

    async def reserve(self, reservation: Reservation) -> GrantedLease:
        """Reserve pages on the worker and return the lease. Raises the worker's `TandemError` if it refuses."""
        request = conversion.to_proto(reservation, worker_pb2.ReserveRequest)
        return conversion.from_proto(await self._call(self._stub.Reserve(request, timeout=self._timeout)), GrantedLease)

    async def prefill(self, task: PrefillTask) -> None:
        """Send a prompt to the worker. Raises the worker's `TandemError` if it refuses the prompt."""
        await self._call(
            self._stub.Prefill(conversion.to_proto(task, worker_pb2.PrefillRequest), timeout=self._timeout)
        )

    def read_ahead(self, prompt: PrefixRun) -> None:
        """See `Worker`."""
        self._spawn(self._send_read_ahead(prompt))

    async def _send_read_ahead(self, prompt: PrefixRun) -> None:
        message = worker_pb2.ReadAheadRequest(prefix=conversion.to_proto(prompt, worker_pb2.PrefixRun))
        try:
            await self._call(self._stub.ReadAhead(message, timeout=self._timeout))
        except TandemError as error:
            log.debug("%s reads nothing ahead: %s", self.name, error)

    def abort(self, ref: RequestRef) -> None:
        """Abort the attempt `ref` of a request, and all earlier attempts, on the worker.

        The call returns at once. All aborts of one iteration of the event loop are sent together, with retries.
        """
        if not self._aborts:
            self._spawn(self._send_aborts())
        self._aborts.append(ref)

    async def _send_aborts(self) -> None:
        refs, self._aborts = self._aborts, []
        message = worker_pb2.AbortWorkRequest(
            router_id=self._router_id, requests=[conversion.to_proto(ref, worker_pb2.RequestRef) for ref in refs]
        )
        tries = 0
        while True:
            try:
                await self._call(self._stub.Abort(message, timeout=self._timeout))
            except DeadlineExceeded as error:
                # The worker may be stalled: try again. If the stream breaks, the worker cancels these requests anyway.
                if not self.connected:
                    self._log_lost_aborts(refs, error)
                    return
            except TandemError as error:
                tries += 1
                if isinstance(error, Unavailable) or tries == _ABORT_TRIES:
                    self._log_lost_aborts(refs, error)
                    return
            else:
                return

    def _log_lost_aborts(self, refs: Sequence[RequestRef], error: TandemError) -> None:
        log.warning("abort of %d requests did not reach %s: %s", len(refs), self.name, error)

    async def _heartbeat(self, leases: Sequence[Lease], timeout_s: float) -> frozenset[Lease]:
        message = worker_pb2.HeartbeatRequest(leases=[conversion.to_proto(lease, worker_pb2.Lease) for lease in leases])
        reply = await self._call(self._stub.Heartbeat(message, timeout=min(timeout_s, self._timeout)))
        return frozenset(conversion.from_proto(lease, Lease) for lease in reply.unknown)

    async def _call(self, call: Awaitable[_Reply]) -> _Reply:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise error_of(error, self.name) from error

    @property
    def name(self) -> str:
        """The worker's name in logs and error messages."""
        return f"worker {self.info.peer.worker_id}"

    # ---- liveness ----

    def _needs_reply(self) -> bool:
        """Return True if heartbeats are needed: the worker has requests of this router, or it is silent."""
        return self.connected and (bool(self.request_ids) or self._probe.silent)

    def _follow_probe(self) -> None:
        self._fleet.set_live(self.state, live=self.live)
        if self.connected:
            log.warning("%s %s", self.name, "does not respond" if self._probe.silent else "responds again")
        self._observer.on_change()

    # ---- the event stream ----

    async def _attach_forever(self) -> None:
        pause = _RECONNECT_S[0]
        while True:
            try:
                await self._attach()
            except grpc.aio.AioRpcError as error:
                log.debug("event stream of %s ended: %s", self.name, error.details())
            except Exception:
                log.exception("event stream of %s failed", self.name)
            pause = _RECONNECT_S[0] if self.connected else min(2 * pause, _RECONNECT_S[1])
            self._set_connected(False)
            await asyncio.sleep(pause)

    async def _attach(self) -> None:
        request = worker_pb2.AttachRequest(router_id=self._router_id, prefixes=True)
        call = self._stub.Attach(request, wait_for_ready=True)
        await call.initial_metadata()
        # Metadata come with the error, too, for example of a worker that ends after a failed step.
        if not call.done():
            self._set_connected(True)
        async for message in call:
            self._probe.observe()
            step = conversion.step_output_from_proto(message)
            self._learn(step)
            self._observer.on_step(self, step)

    def _learn(self, step: StepOutput) -> None:
        """Apply the load report and the prefix cache updates of a step.

        An exception is only logged: it makes placement worse, but must not end the requests of the event stream.
        """
        try:
            self.state.report(step.load)
            for changes in step.prefixes:
                self._prefixes.take(changes)
            self._keep_in_step()
        except Exception:
            log.exception("load report of %s could not be processed", self.name)

    def _set_connected(self, connected: bool) -> None:
        if connected == self.connected:
            return
        self.connected = connected
        self._fleet.set_live(self.state, live=self.live)
        log.info("%s (incarnation %d) %s", self.name, self.info.peer.incarnation, "up" if connected else "lost")
        if connected:
            self._keep_in_step()
        else:
            self._prefixes.lose()
            self._observer.on_lost(self)
        self._observer.on_change()

    def _keep_in_step(self) -> None:
        """Start loading the full list of cached pages if updates are missing, unless it is already being loaded."""
        if not self._prefixes.in_step and (self._listing is None or self._listing.done()):
            self._listing = asyncio.create_task(self._list_prefixes(), name=f"prefixes-{self.info.peer.worker_id}")

    async def _list_prefixes(self) -> None:
        """Load the full list of cached pages, with retries; until then placement works without the list."""
        while self.connected and not self._prefixes.in_step:
            try:
                reply = await self._call(
                    self._stub.ListPrefixes(worker_pb2.ListPrefixesRequest(), timeout=self._timeout)
                )
            except TandemError as error:
                log.info("prefix cache listing of %s failed: %s", self.name, error)
                await asyncio.sleep(_LIST_PAUSE_S)
            else:
                if self.connected:
                    self._prefixes.load(conversion.from_proto(reply, PrefixList))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End the event stream, send the last aborts and close the channel; requests on the worker count as lost."""
        asked = [self._stream, self._probing] if self._listing is None else [self._stream, self._probing, self._listing]
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        self._set_connected(False)
        self._fleet.leave(self.state)
        self.leases.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close()
