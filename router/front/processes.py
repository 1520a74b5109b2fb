"""The listeners in processes of their own, so that writing to clients does not take the router's time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys

from starlette.types import ASGIApp

from router.api.access.grpc_access import GrpcAccess
from router.api.listeners import GOODBYE_S, RouterEndpoints
from router.front.calls import FrontCalls, RouterStream
from router.front.figures import FrontFigures, show
from router.front.process import STREAM_LIMIT_BYTES, FrontConfig
from tandem.logging.logs import LogConfig
from tandem.metrics.registry import Registry
from tandem.net.address import address_of
from tandem.net.frames import FrameStream
from tandem.net.http.server import Listener
from tandem.net.security.api_keys import KeySource
from tandem.protocol.errors import FailedPrecondition, Unavailable
from tandem.protocol.generated.tandem.v1 import front_pb2
from tandem.settings.listeners import DEFAULT_LIMITS, ListenerLimits
from tandem.settings.tls import TlsFiles

log = logging.getLogger(__name__)

_START_S = 60.0
"""Timeout for the first front process to open its listeners, in seconds."""
_AGAIN_S = 1.0
"""Pause before a process that died is restarted, in seconds."""
_END_S = 2 * GOODBYE_S
"""Time for a process to exit after its stream ended or its grace is over, in seconds; after it, it is killed."""
_PORT_S, _PORT_LOOK_S = 5.0, 0.1
"""Timeout and polling interval for the ports of an earlier router to become free, in seconds."""


class FrontListeners:
    """Implements `router.api.listeners.Listeners` by several front processes.

    The kernel distributes connections among them. A process that dies loses its connections and is restarted.
    """

    def __init__(
        self,
        host: str,
        ports: tuple[int, int],
        *,
        count: int,
        keys: KeySource,
        inference: GrpcAccess,
        app: ASGIApp,
        log_config: LogConfig,
        registry: Registry,
        limits: ListenerLimits = DEFAULT_LIMITS,
        tls: TlsFiles | None = None,
    ) -> None:
        """`count` is the number of processes, `ports` are those of gRPC and HTTP, 0 = any free one.

        `inference` and `app` serve the calls; `registry` gets the metrics of the processes.
        """
        self._host, self._ports = host, ports
        self._figures = [FrontFigures(number) for number in range(count)]
        show(self._figures, registry)
        self._keys = keys
        self._inference, self._app = inference, app
        self._log = log_config
        self._limits = limits
        self._tls = tls
        self._serving = False
        self._leaving = False
        self._first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._keepers: list[asyncio.Task[None]] = []
        self._fronts: dict[FrontCalls, asyncio.subprocess.Process] = {}
        self._end: asyncio.TimerHandle | None = None
        self._cleanup = contextlib.ExitStack()

    async def open(self) -> RouterEndpoints:
        """See `Listeners`; returns when the first process serves, raises Unavailable if none does in time."""
        if self._ports[0] and self._ports[0] == self._ports[1]:
            raise FailedPrecondition(f"http_port: {self._ports[1]} is the gRPC listener's; choose another port")
        try:
            grpc_port = await self._hold(self._ports[0], "grpc_port")
            http_port = await self._hold(self._ports[1], "http_port")
        except FailedPrecondition:
            self._cleanup.close()
            raise
        self._keepers = [
            asyncio.create_task(
                self._keep(
                    FrontConfig(
                        f"front-{figures.number}",
                        self._host,
                        grpc_port,
                        http_port,
                        self._keys,
                        self._log,
                        self._limits,
                        self._tls,
                    ),
                    figures,
                )
            )
            for figures in self._figures
        ]
        try:
            async with asyncio.timeout(_START_S):
                await self._first
        except TimeoutError:
            await self.leave(0.0)
            await self.gone()
            raise Unavailable("no front process opened its listeners; the router's log has the details") from None
        return RouterEndpoints(address_of(self._host, grpc_port), address_of(self._host, http_port))

    def set_serving(self, serving: bool) -> None:
        """See `Listeners`."""
        self._serving = serving
        for front in self._fronts:
            front.set_serving(serving)

    async def leave(self, grace_s: float) -> None:
        """See `Listeners`."""
        self._leaving = True
        for front, process in self._fronts.items():
            if front.opened:
                front.leave(grace_s)
            else:  # it has no clients yet and must get none
                _kill(process)
        self._end = asyncio.get_running_loop().call_later(grace_s + _END_S, self._kill_all)

    async def gone(self) -> None:
        """See `Listeners`."""
        await asyncio.gather(*self._keepers, return_exceptions=True)
        if self._end is not None:
            self._end.cancel()
        self._cleanup.close()

    async def _hold(self, port: int, setting: str) -> int:
        """Reserve a free port for processes of this user while this router lives; returns its number.

        The port is first bound exclusively, so that no port in use by another program is shared.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _PORT_S
        while True:
            try:
                found = Listener(self._host, port, setting)
                break
            except FailedPrecondition:
                if loop.time() > deadline:
                    raise
                await asyncio.sleep(_PORT_LOOK_S)
        number: int = found.socket.getsockname()[1]
        found.close()
        held = Listener(self._host, number, setting, shared=True)
        self._cleanup.callback(held.close)
        return number

    async def _keep(self, config: FrontConfig, figures: FrontFigures) -> None:
        while not self._leaving:
            try:
                code = await self._live(config, figures)
            except Exception as error:  # e.g. no process can be started now
                log.error("%s failed", config.name, exc_info=error)
            else:
                if not self._leaving:
                    log.error("%s ended with %d; its clients' connections are lost", config.name, code)
            if not self._leaving:
                figures.restarts += 1
                await asyncio.sleep(_AGAIN_S)

    async def _live(self, config: FrontConfig, figures: FrontFigures) -> int:
        """Run one process from its start to its end; returns its exit code."""
        ours, theirs = socket.socketpair()
        with theirs:
            reader, writer = await asyncio.open_unix_connection(sock=ours, limit=STREAM_LIMIT_BYTES)
            try:
                process = await _spawn(theirs)
            except BaseException:
                writer.close()
                raise
        writer.write(config.to_json().encode() + b"\n")
        stream: RouterStream = FrameStream(reader, writer, front_pb2.RouterFrames, front_pb2.FrontFrames, figures.tally)
        front = FrontCalls(stream, self._inference, self._app)
        self._fronts[front] = process
        if self._leaving:
            _kill(process)
        front.set_serving(self._serving)
        watch = asyncio.create_task(_kill_if_it_hangs(front, process, config.name))
        try:
            await front.run(self._opened, figures.hold)
        finally:
            watch.cancel()
            figures.hold(0)
            stream.close()
            code = await _gone(process)
            del self._fronts[front]
        return code

    def _opened(self) -> None:
        if not self._first.done():
            self._first.set_result(None)

    def _kill_all(self) -> None:
        for process in self._fronts.values():
            _kill(process)


async def _spawn(stream: socket.socket) -> asyncio.subprocess.Process:
    """Start a front process with its end of the stream as standard input.

    It gets this process's import path, and a session of its own, so that a terminal's signals do not reach it: only
    the router ends it.
    """
    command = sys.executable, "-P", "-m", "router.front.process"
    folders = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
    env = {**os.environ, "PYTHONPATH": folders}
    return await asyncio.create_subprocess_exec(*command, stdin=stream.fileno(), env=env, start_new_session=True)


async def _kill_if_it_hangs(front: FrontCalls, process: asyncio.subprocess.Process, name: str) -> None:
    """Kill the process when its heartbeats stop; its stream ends with it."""
    await front.hangs()
    log.error("%s sends no heartbeats any more and is restarted", name)
    _kill(process)


async def _gone(process: asyncio.subprocess.Process) -> int:
    """Return the exit code, after killing a process that does not end in time."""
    try:
        async with asyncio.timeout(_END_S):
            return await process.wait()
    except TimeoutError:
        _kill(process)
        return await process.wait()


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
