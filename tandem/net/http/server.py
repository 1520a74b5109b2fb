"""An HTTP server that runs in an existing event loop, and the socket on which it listens."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import ssl
from asyncio import sslproto
from collections.abc import Iterator
from functools import partial
from typing import Any

import uvicorn

from tandem.net.address import address_of
from tandem.net.http.protocol import READ_BYTES, Connections, GuardedProtocol
from tandem.protocol.errors import FailedPrecondition
from tandem.settings.listeners import DEFAULT_LIMITS, ListenerLimits


class Listener:
    """A listening socket that no other process shares, at host:port; port 0 = any free port.

    Raises FailedPrecondition, which names the `setting`, if the port is taken.
    """

    def __init__(self, host: str, port: int, setting: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # Because the protocol is given, asyncio sets TCP_NODELAY on accepted connections; otherwise an event waits up
        # to 40 ms for the client's acknowledgement of the previous one.
        self.socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._host, self._setting = host, setting
        self._asked = address_of(host, port)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self.socket.bind((host, port))
        except OSError as error:
            self.close()
            raise self.unusable(error) from error
        self.socket.setblocking(False)

    @property
    def address(self) -> str:
        """The address on which the socket listens, host:port."""
        return address_of(self._host, self.socket.getsockname()[1])

    def unusable(self, why: BaseException | str) -> FailedPrecondition:
        """Return the error for an address on which the server cannot listen."""
        return FailedPrecondition(f"{self._setting}: {self._asked} cannot be used ({why}); choose another port")

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()


class HttpServer(uvicorn.Server):
    """A uvicorn server that does not handle signals. Call `begin` once, then `leave` and `gone`."""

    def __init__(
        self,
        app: Any,
        listener: Listener,
        limits: ListenerLimits = DEFAULT_LIMITS,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Create the server for the ASGI 3 application `app`; it takes ownership of the listener.

        With `tls` it is an HTTPS server.
        """
        # uvicorn only calls this class to create protocols, so a partial can replace it.
        protocol: Any = partial(GuardedProtocol, connections=Connections(limits))
        config = uvicorn.Config(
            app,
            interface="asgi3",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # uvicorn's warnings are about clients' mistakes
            access_log=False,
            http=protocol,
            timeout_keep_alive=math.ceil(limits.idle_timeout_s),
        )
        super().__init__(config)
        self._listener = listener
        self._limits = limits
        self._tls = tls
        self._listening = asyncio.Event()

    async def begin(self) -> None:
        """Start the server; return once it accepts requests. Raises FailedPrecondition if the port cannot be used."""
        self._task = asyncio.create_task(self.serve(sockets=[self._listener.socket]), name="http")
        listening = asyncio.create_task(self._listening.wait())
        await asyncio.wait({self._task, listening}, return_when=asyncio.FIRST_COMPLETED)
        if not listening.done():
            listening.cancel()
            raise self._listener.unusable(self._task.exception() or "the server ended")

    def leave(self, grace_s: int) -> None:
        """Stop accepting requests; those in progress may take another `grace_s` seconds."""
        self.config.timeout_graceful_shutdown = grace_s
        self.should_exit = True

    async def gone(self) -> None:
        """Wait until the last request has ended; call it after `leave`."""
        await self._task

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Override uvicorn's method, so that signal handlers stay unchanged."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening."""
        if self._tls is None:
            await super().startup(sockets)
        else:
            await self._startup_with_tls(self._tls)
        self._listening.set()

    async def _startup_with_tls(self, tls: ssl.SSLContext) -> None:
        """Start listening like uvicorn, but with a deadline for the TLS handshake, which uvicorn lacks."""
        # asyncio would read up to 256 KiB at once, and keep a buffer of that size for each connection.
        sslproto.SSLProtocol.max_size = READ_BYTES
        protocol: Any = self.config.http_protocol_class
        make = partial(protocol, config=self.config, server_state=self.server_state, app_state={})
        server = await asyncio.get_running_loop().create_server(
            make,
            sock=self._listener.socket,
            ssl=tls,
            backlog=self.config.backlog,
            ssl_handshake_timeout=self._limits.header_timeout_s,
        )
        self.servers = [server]
        self.started = True
