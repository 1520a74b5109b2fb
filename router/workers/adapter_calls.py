"""The operator's calls that load and unload adapters, which the controller executes for the whole cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc.aio

from router.workers.worker_pool import WorkerPool
from tandem.net.rpc import error_of
from tandem.protocol import conversion
from tandem.protocol.errors import DeadlineExceeded
from tandem.protocol.generated.tandem.v1 import types_pb2
from tandem.protocol.messages import AdapterFacts

_CHANGE_S = 300.0
"""Timeout of loading or unloading, in seconds; it is long because each worker reads the adapter's files."""
_FOLLOW_S = 10.0
"""Maximum time until this router sees a change that the controller has made, in seconds."""

_Reply = TypeVar("_Reply")


class AdapterCalls:
    """Loads and unloads adapters through the controller. The router has one; all calls are on the event loop.

    When a call returns, this router has applied the change; other routers apply it shortly after.
    """

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool

    async def load(self, name: str, path: str) -> AdapterFacts:
        """Make every worker load the adapter in the folder `path`; return the adapter once requests can use it.

        Raises the errors of `Adapters.load` in `tandem/cluster/operations/adapters.py`, Unavailable if there is no
        controller, and DeadlineExceeded if this router does not see the change in time.
        """
        request = types_pb2.LoadAdapterRequest(lora_name=name, lora_path=path)
        reply = await _typed(self._pool.controller.LoadAdapter(request, timeout=_CHANGE_S))
        adapter = conversion.from_proto(reply.adapter, AdapterFacts)
        await self._wait_for_membership(lambda: adapter in self._pool.adapters)
        return adapter

    async def unload(self, name: str) -> None:
        """Unload the adapter `name`; new requests cannot use it then. Raises NotFound if it is not loaded."""
        request = types_pb2.UnloadAdapterRequest(lora_name=name)
        await _typed(self._pool.controller.UnloadAdapter(request, timeout=_CHANGE_S))
        await self._wait_for_membership(lambda: all(adapter.name != name for adapter in self._pool.adapters))

    async def _wait_for_membership(self, changed: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(_FOLLOW_S):
                await self._pool.until(changed)
        except TimeoutError:
            raise DeadlineExceeded("the adapters have changed, and this router has yet to follow; look again") from None


async def _typed(call: Awaitable[_Reply]) -> _Reply:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise error_of(error, "the controller") from error
