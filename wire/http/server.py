"""An HTTP server in an event loop that is somebody else's, and where it listens."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any

import uvicorn

from wire.address import address_of
from wire.errors import FailedPrecondition
from wire.http.protocol import Connections, GuardedProtocol
from wire.limits.listener_limits import DEFAULT_LIMITS, ListenerLimits


class Listener:
    """A socket at host:port that nobody else has, 0 = any free port; or, `shared`, nobody but processes of this user
    that share it as well. FailedPrecondition names the `setting` of a port that is taken.
    """

    def __init__(self, host: str, port: int, setting: str, *, shared: bool = False) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # With the protocol named, asyncio sets TCP_NODELAY on what is accepted: else an event that follows another one
        # waits for the client's acknowledgement of that, up to 40 ms.
        self.socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._host, self._setting = host, setting
        self._asked = address_of(host, port)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            self.socket.bind((host, port))
        except OSError as error:
            self.close()
            raise self.unusable(error) from error
        self.socket.setblocking(False)

    @property
    def address(self) -> str:
        """host:port."""
        return address_of(self._host, self.socket.getsockname()[1])

    def unusable(self, why: BaseException | str) -> FailedPrecondition:
        """The error that says so."""
        return FailedPrecondition(f"{self._setting}: {self._asked} cannot be used ({why}); choose another port")

    def close(self) -> None:
        """Give the port back."""
        self.socket.close()


class HttpServer(uvicorn.Server):
    """Signals stay the process's own. `begin` it once, `end` it once."""

    def __init__(self, app: Any, listener: Listener, limits: ListenerLimits = DEFAULT_LIMITS) -> None:
        """`app` speaks ASGI 3; the listener is this server's from now on."""
        # A partial makes protocols as the class does, which is all that is asked of it.
        protocol: Any = partial(GuardedProtocol, connections=Connections(limits))
        config = uvicorn.Config(
            app,
            interface="asgi3",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # what warnings are about, strangers do
            access_log=False,
            http=protocol,
            timeout_keep_alive=math.ceil(limits.idle_timeout_s),
        )
        super().__init__(config)
        self._listener = listener
        self._listening = asyncio.Event()

    async def begin(self) -> None:
        """Serve; returns once calls are welcome. FailedPrecondition if the port cannot be listened on."""
        self._task = asyncio.create_task(self.serve(sockets=[self._listener.socket]), name="http")
        listening = asyncio.create_task(self._listening.wait())
        await asyncio.wait({self._task, listening}, return_when=asyncio.FIRST_COMPLETED)
        if not listening.done():
            listening.cancel()
            raise self._listener.unusable(self._task.exception() or "the server ended")

    def leave(self, grace_s: int) -> None:
        """Take no more calls; those that run have so long."""
        self.config.timeout_graceful_shutdown = grace_s
        self.should_exit = True

    async def gone(self) -> None:
        """Wait for the last call, behind `leave`."""
        await self._task

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._listening.set()
