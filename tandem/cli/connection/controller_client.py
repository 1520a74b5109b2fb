"""The client of the controller, for commands and benchmarks that change a running cluster."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc.aio

from tandem.net.rpc import ERROR_CODE, error_of, is_refused_peer, open_channel
from tandem.protocol import conversion
from tandem.protocol.errors import TandemError, Unauthenticated, Unavailable
from tandem.protocol.generated.tandem.v1 import cluster_pb2, cluster_pb2_grpc, types_pb2
from tandem.protocol.messages import Absence, AdapterFacts, Membership, WorkerInfo

GRACE_S = 30.0
"""Default time that workers have to finish their requests, in seconds."""
WAIT_S = 180.0
"""Default time to wait for new workers, in seconds."""
_CHANGE_MARGIN_S = 240.0
"""Seconds that a change of the cluster may take beyond its grace: to connect, end transfers, and restart a worker."""
_LOOK_S = 10.0
"""Deadline of the call that lists the workers, in seconds."""

Result = TypeVar("Result")


class ControllerClient:
    """A client of one controller. Every failure is a TandemError that names the controller."""

    def __init__(self, address: str, token: str) -> None:
        self._address = address
        self._token = token

    async def set_mode(
        self,
        mode: str,
        *,
        prefill: int = 0,
        decode: int = 0,
        step_policy: str = "",
        step_budget: int = 0,
        itl_target_s: float = 0.0,
        grace_s: float = GRACE_S,
    ) -> tuple[tuple[WorkerInfo, ...], float]:
        """Change the mode, and return the resulting workers and the duration in seconds. See `SetModeRequest`."""
        request = cluster_pb2.SetModeRequest(
            mode=mode,
            prefill=prefill,
            decode=decode,
            step_policy=step_policy,
            step_budget=step_budget,
            itl_target_s=itl_target_s,
            grace_s=grace_s,
        )
        reply = await self._call(lambda stub: stub.SetMode(request, timeout=grace_s + _CHANGE_MARGIN_S))
        return tuple(conversion.from_proto(info, WorkerInfo) for info in reply.workers), float(reply.seconds)

    async def resize(
        self,
        *,
        prefill: int = 0,
        decode: int = 0,
        workers: int = 0,
        grace_s: float = GRACE_S,
        wait_s: float = WAIT_S,
    ) -> tuple[tuple[WorkerInfo, ...], float]:
        """Change the number of workers, and return the resulting workers and the duration in seconds.

        See `ResizeRequest`.
        """
        request = cluster_pb2.ResizeRequest(
            prefill=prefill, decode=decode, workers=workers, grace_s=grace_s, wait_s=wait_s
        )
        reply = await self._call(lambda stub: stub.Resize(request, timeout=grace_s + wait_s + _CHANGE_MARGIN_S))
        return tuple(conversion.from_proto(info, WorkerInfo) for info in reply.workers), float(reply.seconds)

    async def workers(self) -> tuple[WorkerInfo, ...]:
        """Return all workers that serve at present."""
        return (await self._membership()).workers

    async def _membership(self) -> Membership:
        async with open_channel(self._address, self._token) as channel:
            stub: Any = cluster_pb2_grpc.ClusterStub(channel)
            call = stub.Watch(cluster_pb2.WatchRequest(), timeout=_LOOK_S)
            membership = await self._typed(call.read())
            call.cancel()
        return conversion.from_proto(membership, Membership)

    async def absent(self) -> tuple[Absence, ...]:
        """Return the workers that were requested but do not serve at present."""
        reply = await self._call(lambda stub: stub.ListAbsent(cluster_pb2.ListAbsentRequest(), timeout=_LOOK_S))
        return tuple(conversion.from_proto(absence, Absence) for absence in reply.workers)

    async def drain_worker(
        self,
        worker_id: str,
        *,
        grace_s: float = GRACE_S,
        restart: bool = False,
        force: bool = False,
        node_leaves: bool = False,
    ) -> float:
        """Drain a worker, and return the duration in seconds. See `DrainWorkerRequest`."""
        request = cluster_pb2.DrainWorkerRequest(
            worker_id=worker_id, grace_s=grace_s, restart=restart, force=force, node_leaves=node_leaves
        )
        reply = await self._call(lambda stub: stub.DrainWorker(request, timeout=grace_s + _CHANGE_MARGIN_S))
        return float(reply.seconds)

    async def load_adapter(self, name: str, path: str) -> AdapterFacts:
        """Load an adapter into all workers; return it once requests may name it. See `LoadAdapterRequest`."""
        request = types_pb2.LoadAdapterRequest(lora_name=name, lora_path=path)
        reply = await self._call(lambda stub: stub.LoadAdapter(request, timeout=_CHANGE_MARGIN_S))
        return conversion.from_proto(reply.adapter, AdapterFacts)

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter from all workers. Raises NotFound if it is not loaded."""
        request = types_pb2.UnloadAdapterRequest(lora_name=name)
        await self._call(lambda stub: stub.UnloadAdapter(request, timeout=_CHANGE_MARGIN_S))

    async def adapters(self) -> tuple[AdapterFacts, ...]:
        """Return the adapters that requests may name."""
        membership = await self._membership()
        if membership.adapters is not None:
            return membership.adapters
        return membership.workers[0].model.adapters if membership.workers else ()

    async def _call(self, ask: Callable[[Any], Awaitable[Any]]) -> Any:
        """Connect to the controller, make the call `ask(stub)`, and return its reply."""
        async with open_channel(self._address, self._token) as channel:
            return await self._typed(ask(cluster_pb2_grpc.ClusterStub(channel)))

    async def _typed(self, call: Awaitable[Result]) -> Result:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from None

    def _error(self, error: grpc.aio.AioRpcError) -> TandemError:
        """Return the controller's own error or, if only the transport failed, Unauthenticated or Unavailable."""
        if any(key == ERROR_CODE for key, _ in error.trailing_metadata() or ()):
            return error_of(error, "the controller")
        if is_refused_peer(error):
            return Unauthenticated(
                f"the TLS handshake with the controller at {self._address} failed: is --token (TANDEM_CLUSTER_TOKEN) "
                "the token of that cluster?"
            )
        return Unavailable(f"cannot reach the controller at {self._address}; is `tandem up` running there?")
