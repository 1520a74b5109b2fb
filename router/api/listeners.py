"""The router's listeners for clients: a gRPC and an HTTP server on one event loop."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from starlette.types import ASGIApp

from tandem.net.address import address_of
from tandem.net.http.server import HttpServer, Listener
from tandem.net.rpc import Check, Rejected, open_server
from tandem.net.security.server_tls import ServerTls
from tandem.protocol.errors import FailedPrecondition
from tandem.protocol.generated.tandem.v1 import inference_pb2
from tandem.settings.listeners import DEFAULT_LIMITS, ListenerLimits
from tandem.settings.tls import TlsFiles

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
GOODBYE_S = 2.0
"""Time after the grace period in which calls may still send their last messages, in seconds."""
_HEALTH_METHODS = "/grpc.health.v1.Health/"


@dataclass(frozen=True, slots=True)
class RouterEndpoints:
    """The addresses of the listeners, each as host:port."""

    grpc_address: str
    http_address: str
    operations_address: str = ""
    """The address of probes, metrics and traces over plain HTTP if `http_address` uses TLS, else ""."""


class Listeners:
    """The gRPC server and the HTTP server of this process; call `open`, then `leave`, then `gone`, each once.

    The router's server owns it; all calls are on the event loop.
    """

    def __init__(
        self,
        host: str,
        ports: tuple[int, int],
        *,
        check: Check,
        rejected: Rejected,
        add_inference: Callable[[grpc.aio.Server], None],
        app: ASGIApp,
        limits: ListenerLimits = DEFAULT_LIMITS,
        tls: TlsFiles | None = None,
    ) -> None:
        """`ports` are the ports of gRPC and HTTP; 0 = any free port.

        `check` is applied to the metadata of gRPC calls, and `rejected` is called with each call that `check` rejects;
        `app` checks HTTP requests itself. `add_inference` adds `tandem.v1.Inference` to a server. Raises
        InvalidArgument if the files of `tls` cannot be used.
        """
        self._host, (self._grpc_port, self._http_port) = host, ports
        self._check = check
        self._rejected = rejected
        self._add_inference = add_inference
        self._app = app
        self._limits = limits
        self._tls = None if tls is None else ServerTls(tls)
        self._health = health.aio.HealthServicer()
        self._status = health_pb2.HealthCheckResponse.NOT_SERVING
        self._background: set[asyncio.Task[None]] = set()

    async def open(self) -> RouterEndpoints:
        """Start accepting calls of clients. Raises FailedPrecondition, which names the setting, if a port is taken."""
        listener = Listener(self._host, self._http_port, "http_port")
        self._grpc = open_server(
            check=self._check,
            rejected=self._rejected,
            open_methods=(_HEALTH_METHODS,),
            limits=self._limits,
        )
        try:
            grpc_port = await self._open_grpc()
            https = None if self._tls is None else self._tls.http_context()
            self._http = HttpServer(self._app, listener, self._limits, https)
            await self._http.begin()
        except FailedPrecondition:
            listener.close()
            await self._grpc.stop(None)
            raise
        return RouterEndpoints(address_of(self._host, grpc_port), listener.address)

    def set_serving(self, serving: bool) -> None:
        """Set the status of the gRPC health service; `serving` is True if a request would be served now."""
        replies = health_pb2.HealthCheckResponse
        self._status = replies.SERVING if serving else replies.NOT_SERVING
        self._spawn(asyncio.create_task(self._health.set(SERVICE, self._status)))

    async def leave(self, grace_s: float) -> None:
        """Stop accepting calls; running calls may last `grace_s` seconds, plus `GOODBYE_S` for their last messages."""
        await self._health.enter_graceful_shutdown()
        self._http.leave(math.ceil(grace_s + GOODBYE_S))
        self._spawn(asyncio.create_task(self._grpc.stop(grace_s + GOODBYE_S)))

    async def gone(self) -> None:
        """Wait until the last call has ended; must be called after `leave`."""
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._http.gone()

    async def _open_grpc(self) -> int:
        self._add_inference(self._grpc)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._grpc)
        port = self._bind_grpc()
        await self._health.set(SERVICE, self._status)
        await self._grpc.start()
        return port

    def _bind_grpc(self) -> int:
        address = address_of(self._host, self._grpc_port)
        try:
            if self._tls is None:
                return self._grpc.add_insecure_port(address)
            return self._grpc.add_secure_port(address, self._tls.grpc_credentials())
        except RuntimeError as error:
            message = f"grpc_port: {address} cannot be used ({error}); choose another port"
            raise FailedPrecondition(message) from error

    def _spawn(self, task: asyncio.Task[None]) -> None:
        self._background.add(task)
        task.add_done_callback(self._background.discard)
