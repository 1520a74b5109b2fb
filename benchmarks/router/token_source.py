"""A stand-in worker that sends each request one token per step, and the membership by which routers find it.

It generates the load for measurements of a router alone. Each token id encodes the time at which it was sent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, cast

from tandem.cluster.operations.adapters import Adapters
from tandem.cluster.operations.operator import Operator
from tandem.cluster.service import ClusterServicer
from tandem.cluster.supervision.registry import Registry
from tandem.net.rpc import listen, open_server
from tandem.protocol import conversion
from tandem.protocol.generated.tandem.v1 import cluster_pb2_grpc, worker_pb2, worker_pb2_grpc
from tandem.protocol.lifecycle.events import EventTime, LifecycleEvent
from tandem.protocol.messages import (
    FinishReason,
    GrantedLease,
    Lease,
    ModelFacts,
    PeerRef,
    PrefillTask,
    RequestEvent,
    Reservation,
    Role,
    StepOutput,
    StepTokens,
    WorkerInfo,
    WorkerLoad,
)

MODEL = ModelFacts("tokens", 49_152, 8192, (2,), "none")
TOKEN = "router-benchmark"
"""The cluster token of the routers, needed because the processes of a cluster encrypt their communication."""
_PAGES, _PAGE_TOKENS = 1 << 20, 128
_REQUESTS_MAX = 4096
_LEASE_S = 3600.0
_FIRST_ID = 1000
"""Lowest token id, above all stop tokens."""
_TICKS, _TICK_S = 40_000, 1e-4
"""Token ids count ticks of `time.monotonic`, and wrap around after `_TICKS`."""


def token_of(now: float) -> int:
    """Return the token id that encodes the send time `now`, a time of `time.monotonic`."""
    return _FIRST_ID + int(now / _TICK_S) % _TICKS


def age_of(token: int, now: float) -> float:
    """Return the seconds since a token was sent, with a resolution of 0.1 ms and modulo 4 s."""
    return (int(now / _TICK_S) - token + _FIRST_ID) % _TICKS * _TICK_S


class TokenSource(worker_pb2_grpc.WorkerServicer):
    """A stand-in worker of both roles for one router at a time. All methods run in the event loop."""

    def __init__(self, step_s: float) -> None:
        """Send each request a token every `step_s` seconds."""
        self._step_s = step_s
        self._running: dict[str, tuple[PrefillTask, int]] = {}
        self._out: asyncio.Queue[StepOutput] = asyncio.Queue()
        self._epoch = self._step = 0

    async def start(self) -> str:
        """Serve as the only member of a cluster, and return the controller's address."""
        server = open_server()
        worker_pb2_grpc.add_WorkerServicer_to_server(self, server)
        registry = Registry()
        operator, adapters = cast(Operator, None), cast(Adapters, None)  # no operation is ever requested
        servicer = ClusterServicer(registry, operator, adapters, _no_metrics)
        cluster_pb2_grpc.add_ClusterServicer_to_server(servicer, server)
        address = f"127.0.0.1:{listen(server, '127.0.0.1:0', TOKEN)}"
        await server.start()
        self._server = server
        me = PeerRef("source-0", 1)
        pool = _PAGES, _PAGE_TOKENS, _REQUESTS_MAX, MODEL.max_context
        registry.register(WorkerInfo(me, Role.BOTH, address, MODEL, *pool, "none", "none"))
        self._stepping = asyncio.create_task(self._steps())
        return address

    async def Attach(self, _request: Any, context: Any) -> AsyncIterator[worker_pb2.StepOutput]:
        """Stream step outputs to the router that attached last."""
        self._running.clear()
        self._out = asyncio.Queue()
        await context.send_initial_metadata(())
        while True:
            yield conversion.step_output_to_proto(await self._out.get())

    async def Reserve(self, request: Any, _context: Any) -> Any:
        """Grant a lease at once."""
        ref = conversion.from_proto(request, Reservation).ref
        self._epoch += 1
        return conversion.to_proto(
            GrantedLease(Lease(ref.request_id, ref.attempt, self._epoch), _LEASE_S), worker_pb2.ReserveResponse
        )

    async def Prefill(self, request: Any, _context: Any) -> worker_pb2.PrefillResponse:
        """Send the first token at once; the others follow step by step."""
        task = conversion.from_proto(request, PrefillTask)
        event_times = tuple(
            EventTime.now(event) for event in (LifecycleEvent.PREFILL_FINISHED, LifecycleEvent.DECODE_ADMITTED)
        )
        self._running[task.ref.request_id] = task, 1
        self._publish((RequestEvent(task.ref, 0, (token_of(time.monotonic()),), event_times=event_times),))
        return worker_pb2.PrefillResponse()

    async def Abort(self, request: Any, _context: Any) -> worker_pb2.AbortWorkResponse:
        """End the requests that the message names."""
        for ref in request.requests:
            self._running.pop(ref.request_id, None)
        return worker_pb2.AbortWorkResponse()

    async def Heartbeat(self, _request: Any, _context: Any) -> worker_pb2.HeartbeatResponse:
        """Accept a router's heartbeat."""
        return worker_pb2.HeartbeatResponse()

    async def ListPrefixes(self, _request: Any, _context: Any) -> Any:
        """Return an empty list, because there is no prefix cache."""
        return worker_pb2.ListPrefixesResponse()

    async def _steps(self) -> None:
        while True:
            await asyncio.sleep(self._step_s)
            more: list[tuple[str, int, int, int]] = []
            last: list[RequestEvent] = []
            token = token_of(time.monotonic())
            for request_id, (task, index) in list(self._running.items()):
                if index + 1 == task.sampling.max_tokens:
                    del self._running[request_id]
                    last.append(RequestEvent(task.ref, index, (token,), FinishReason.LENGTH))
                else:
                    self._running[request_id] = task, index + 1
                    more.append((request_id, task.ref.attempt, index, token))
            if more or last:
                self._publish(tuple(last), (StepTokens(*zip(*more, strict=True)),) if more else ())

    def _publish(self, events: tuple[RequestEvent, ...], tokens: tuple[StepTokens, ...] = ()) -> None:
        self._step += 1
        load = WorkerLoad(0, 0, len(self._running), 0, _PAGES)
        self._out.put_nowait(StepOutput(self._step, events, load, (), tokens))


async def _no_metrics() -> str:
    return ""
