"""Both doors in processes of their own, so that writing to clients does not take the router's time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import tempfile
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from starlette.types import ASGIApp

from router.doors import GOODBYE_S, RouterEndpoints
from router.front.calls import FrontCalls, RouterStream
from router.front.process import FrontConfig
from wire.address import address_of
from wire.errors import FailedPrecondition, Unavailable
from wire.frames import FrameStream
from wire.generated.tandem.v1 import front_pb2, inference_pb2_grpc
from wire.http_server import Listener

log = logging.getLogger(__name__)

_START_S = 60.0
"""For the first of them to open its doors."""
_AGAIN_S = 1.0
"""Before one that died is started again."""
_PORT_S, _PORT_LOOK_S = 5.0, 0.1
"""How long those of a router that died may keep its ports, and how often that is looked at."""


class FrontDoors:
    """See `router.doors.Doors`. Clients' connections are spread over `count` processes by the kernel; one that dies
    takes its connections with it, and another takes its place.
    """

    def __init__(
        self,
        host: str,
        ports: tuple[int, int],
        *,
        count: int,
        api_keys: Collection[str],
        inference: inference_pb2_grpc.InferenceServicer,
        app: ASGIApp,
        log_format: str,
    ) -> None:
        """`ports`: of gRPC and HTTP, 0 = any free one; `inference` and `app` answer clients' calls."""
        self._host, self._ports = host, ports
        self._count = count
        self._api_keys = tuple(api_keys)
        self._inference, self._app = inference, app
        self._log_format = log_format
        self._serving = False
        self._leaving = False
        self._attached: dict[FrontCalls, asyncio.Task[None] | None] = {}
        self._first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._keepers: list[asyncio.Task[None]] = []
        self._processes: set[asyncio.subprocess.Process] = set()
        self._cleanup = contextlib.ExitStack()

    async def open(self) -> RouterEndpoints:
        """See `Doors`; returns when the first process serves. Unavailable if none does."""
        if self._ports[0] and self._ports[0] == self._ports[1]:
            raise FailedPrecondition(f"http_port: {self._ports[1]} is the gRPC door's; choose another port")
        grpc_port, http_port = (
            await self._hold(self._ports[0], "grpc_port"),
            await self._hold(self._ports[1], "http_port"),
        )
        folder = Path(self._cleanup.enter_context(tempfile.TemporaryDirectory(prefix="tandem-front-")))
        self._server = await asyncio.start_unix_server(self._attach, folder / "router")
        config = FrontConfig(
            "front", str(folder / "router"), self._host, grpc_port, http_port, self._api_keys, self._log_format
        )
        self._keepers = [
            asyncio.create_task(self._keep(replace(config, name=f"front-{number}"))) for number in range(self._count)
        ]
        try:
            async with asyncio.timeout(_START_S):
                await self._first
        except TimeoutError:
            await self.leave(0.0)
            await self.gone()
            raise Unavailable("no front process opened its doors; the router's log has the details") from None
        return RouterEndpoints(address_of(self._host, grpc_port), address_of(self._host, http_port))

    def set_serving(self, serving: bool) -> None:
        """See `Doors`."""
        self._serving = serving
        for front in self._attached:
            front.set_serving(serving)

    async def leave(self, grace_s: float) -> None:
        """See `Doors`."""
        self._leaving = True
        for front in self._attached:
            front.leave(grace_s)
        asyncio.get_running_loop().call_later(grace_s + 2 * GOODBYE_S, self._kill)

    async def gone(self) -> None:
        """See `Doors`."""
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await asyncio.gather(*(task for task in self._attached.values() if task is not None), return_exceptions=True)
        self._server.close()
        self._cleanup.close()

    async def _hold(self, port: int, setting: str) -> int:
        """A port that only processes of this user can listen at, while this router lives. Nobody else's is taken: it
        must have been free.
        """
        loop = asyncio.get_running_loop()
        patience = loop.time() + _PORT_S
        while True:
            try:
                found = Listener(self._host, port, setting)
                break
            except FailedPrecondition:
                if loop.time() > patience:
                    self._cleanup.close()
                    raise
                await asyncio.sleep(_PORT_LOOK_S)
        number: int = found.socket.getsockname()[1]
        found.close()
        held = Listener(self._host, number, setting, shared=True)
        self._cleanup.callback(held.close)
        return number

    async def _keep(self, config: FrontConfig) -> None:
        while not self._leaving:
            command = sys.executable, "-m", "router.front.process"
            process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE)
            self._processes.add(process)
            await process.communicate(config.to_json().encode())
            self._processes.discard(process)
            if not self._leaving:
                log.error("%s ended with %d; its clients' connections are lost", config.name, process.returncode)
                await asyncio.sleep(_AGAIN_S)

    async def _attach(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream: RouterStream = FrameStream(reader, writer, front_pb2.RouterFrames, front_pb2.FrontFrames)
        front = FrontCalls(stream, self._inference, self._app)
        self._attached[front] = asyncio.current_task()
        front.set_serving(self._serving)
        try:
            await front.run(self._opened)
        finally:
            del self._attached[front]
            stream.close()

    def _opened(self) -> None:
        if not self._first.done():
            self._first.set_result(None)

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
