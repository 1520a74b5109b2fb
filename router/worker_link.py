"""The router's end of one run of one worker: a channel, one event stream, and the books of what was placed there."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

import grpc.aio

from router.lease_keeper import LeaseKeeper
from router.placement import WorkerView
from wire import convert
from wire.errors import TandemError, Unavailable
from wire.generated.tandem.v1 import worker_pb2, worker_pb2_grpc
from wire.messages import (
    GrantedLease,
    Lease,
    PrefillTask,
    RequestRef,
    Reservation,
    StepEvents,
    WorkerInfo,
    WorkerLoad,
)
from wire.rpc import error_of, open_channel

log = logging.getLogger(__name__)

_LOAD_FRESH_S = 1.0
"""A worker without work sends no load: older reports count for nothing."""
_REFUSAL_PAUSE_S = 0.05
_RECONNECT_S = (0.05, 1.0)
"""First and longest pause before the event stream is opened again."""
_ABORT_TRIES = 3

_Reply = TypeVar("_Reply")


class LinkObserver(Protocol):
    """Who hears of a worker. All calls come on the event loop."""

    def on_step(self, link: WorkerLink, step: StepEvents) -> None:
        """One step's events."""

    def on_lost(self, link: WorkerLink) -> None:
        """The event stream broke: the worker has cancelled, or lost, every request of this router."""

    def on_lease_lost(self, link: WorkerLink, lease: Lease) -> None:
        """The worker no longer holds a lease that was never admitted."""

    def on_change(self) -> None:
        """Connected, disconnected, or room again: waiting requests may have a place now."""


class WorkerLink:
    """A connection to one incarnation of a worker. The pool opens and closes it."""

    def __init__(
        self, info: WorkerInfo, router_id: str, token: str, rpc_timeout_s: float, observer: LinkObserver
    ) -> None:
        self.info = info
        self.connected = False
        self.retired = False
        """Whether it takes nothing new: it left the cluster, what runs there may end."""
        self._router_id = router_id
        self._timeout = rpc_timeout_s
        self._observer = observer
        self._channel = open_channel(info.address, token)
        self._stub = worker_pb2_grpc.WorkerStub(self._channel)
        self._prefills: dict[str, int] = {}
        self._prefill_tokens = 0
        self._decodes: dict[str, int] = {}
        self._pages = 0
        self._load: WorkerLoad | None = None
        self._load_at = 0.0
        self._refused_at = 0.0
        self._aborts: list[RequestRef] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.leases = LeaseKeeper(self._heartbeat, lambda lease: observer.on_lease_lost(self, lease))
        self._stream = asyncio.create_task(self._attach_forever(), name=f"attach-{info.peer.worker_id}")

    # ---- books ----

    @property
    def request_ids(self) -> set[str]:
        """Requests this worker is still needed for."""
        return {*self._prefills, *self._decodes}

    def book_prefill(self, request_id: str, prompt_tokens: int) -> None:
        """A prompt goes there."""
        self._prefills[request_id] = prompt_tokens
        self._prefill_tokens += prompt_tokens

    def prompt_computed(self, request_id: str) -> None:
        """Its prompt is computed, its KV may still be on the way."""
        tokens = self._prefills.get(request_id, 0)
        if tokens:
            self._prefills[request_id] = 0
            self._prefill_tokens -= tokens

    def unbook_prefill(self, request_id: str) -> None:
        """This worker's prefill half is done with it."""
        self._prefill_tokens -= self._prefills.pop(request_id, 0)

    def book_decode(self, request_id: str, pages: int) -> None:
        """An answer of at most this size is going to be decoded there."""
        self._decodes[request_id] = pages
        self._pages += pages

    def unbook_decode(self, request_id: str) -> None:
        """Nothing of it is there any more."""
        self.leases.drop(request_id)
        pages = self._decodes.pop(request_id, None)
        if pages is not None:
            self._pages -= pages
            self._load_at = 0.0  # the last report still counts these pages

    def refuse_for_a_moment(self) -> None:
        """It turned a request away: ask others first."""
        self._refused_at = time.monotonic()
        asyncio.get_running_loop().call_later(_REFUSAL_PAUSE_S, self._observer.on_change)

    def view(self) -> WorkerView:
        """What placement needs to know now."""
        now = time.monotonic()
        load = self._load if now - self._load_at < _LOAD_FRESH_S else None
        return WorkerView(
            peer=self.info.peer,
            role=self.info.role,
            max_step_tokens=self.info.max_step_tokens,
            max_batch_requests=self.info.max_batch_requests,
            page_tokens=self.info.page_tokens,
            pages_total=self.info.pages_total,
            prefill_idle=self._prefill_tokens == 0,
            prefill_tokens=max(self._prefill_tokens, load.prefill_tokens if load else 0),
            decode_requests=max(len(self._decodes), load.decode_requests if load else 0),
            pages_used=max(self._pages, load.pages_used if load else 0),
            refusing=bool(self.info.not_ready) or now - self._refused_at < _REFUSAL_PAUSE_S,
        )

    # ---- calls ----

    async def reserve(self, reservation: Reservation) -> GrantedLease:
        """Ask a decode worker for a lease; its `TandemError` if it refuses."""
        request = convert.reservation_to_proto(reservation)
        return convert.granted_from_proto(await self._call(self._stub.Reserve(request, timeout=self._timeout)))

    async def prefill(self, task: PrefillTask) -> None:
        """Hand a prompt to a prefill worker; its `TandemError` if it refuses."""
        await self._call(self._stub.Prefill(convert.prefill_task_to_proto(task), timeout=self._timeout))

    def abort(self, ref: RequestRef) -> None:
        """Let the worker forget `ref` and earlier attempts; those of one moment go in one message."""
        if not self._aborts:
            self._spawn(self._send_aborts())
        self._aborts.append(ref)

    async def _send_aborts(self) -> None:
        refs, self._aborts = self._aborts, []
        message = worker_pb2.AbortWorkRequest(
            router_id=self._router_id, requests=[convert.ref_to_proto(ref) for ref in refs]
        )
        for attempt in range(1, _ABORT_TRIES + 1):
            try:
                await self._call(self._stub.Abort(message, timeout=self._timeout))
            except TandemError as error:
                # The worker cancels everything of ours when the stream breaks, so a dead one needs no abort.
                if isinstance(error, Unavailable) or attempt == _ABORT_TRIES:
                    log.warning("abort of %d requests did not reach %s: %s", len(refs), self.name, error)
                    return
            else:
                return

    async def _heartbeat(self, leases: Sequence[Lease], timeout_s: float) -> frozenset[Lease]:
        message = worker_pb2.HeartbeatRequest(leases=[convert.lease_to_proto(lease) for lease in leases])
        reply = await self._call(self._stub.Heartbeat(message, timeout=min(timeout_s, self._timeout)))
        return frozenset(convert.lease_from_proto(lease) for lease in reply.unknown)

    async def _call(self, call: Awaitable[_Reply]) -> _Reply:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise error_of(error, self.name) from error

    @property
    def name(self) -> str:
        return f"worker {self.info.peer.worker_id}"

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
        call = self._stub.Attach(worker_pb2.AttachRequest(router_id=self._router_id), wait_for_ready=True)
        await call.initial_metadata()
        self._set_connected(True)
        async for message in call:
            step = convert.step_events_from_proto(message)
            self._load, self._load_at = step.load, time.monotonic()
            self._observer.on_step(self, step)

    def _set_connected(self, connected: bool) -> None:
        if connected == self.connected:
            return
        self.connected = connected
        log.info("%s (incarnation %d) %s", self.name, self.info.peer.incarnation, "up" if connected else "lost")
        if not connected:
            self._observer.on_lost(self)
        self._observer.on_change()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Send the last aborts, end the stream, close the channel. Its requests are lost if there are any."""
        self._stream.cancel()
        await asyncio.gather(self._stream, return_exceptions=True)
        self._set_connected(False)
        self.leases.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close()
