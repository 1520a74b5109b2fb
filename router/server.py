"""One router: both doors on one event loop, over one dispatcher."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
from dataclasses import dataclass

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from router.admission import Admission
from router.config import RouterConfig
from router.cost_placement import CostPlacement
from router.dispatch import Dispatcher
from router.http import make_app
from router.model_folder import GenerationDefaults, read_generation_defaults
from router.otlp import TraceExporter, otlp_exporter
from router.placement import Placement
from router.service import InferenceServicer
from router.tokenizer import Tokenizer
from wire.address import address_of, is_loopback
from wire.errors import FailedPrecondition
from wire.generated.tandem.v1 import inference_pb2, inference_pb2_grpc
from wire.http_server import HttpServer, Listener
from wire.rpc import open_server

log = logging.getLogger(__name__)

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
_GOODBYE_S = 2.0
"""Time for the last messages to leave, after every request has ended."""
_HEALTH_METHODS = "/grpc.health.v1.Health/"


@dataclass(frozen=True, slots=True)
class RouterEndpoints:
    """Where the doors are, host:port each."""

    grpc_address: str
    http_address: str


class RouterServer:
    """Start it once, stop it once, both on the same event loop."""

    def __init__(self, config: RouterConfig, placement: Placement | None = None) -> None:
        """`placement` chooses workers; None = by predicted cost."""
        self._config = config
        self._placement = placement or CostPlacement(config.mode)
        self._health = health.aio.HealthServicer()
        self._ready: bool | None = None
        self._exporter: TraceExporter | None = None
        self._background: set[asyncio.Task[None]] = set()

    async def start(self) -> RouterEndpoints:
        """Load the tokenizer, follow the cluster, open both doors. Workers may come later: until then requests get
        `Unavailable`. `ModelError` or `FailedPrecondition` (a port is taken) say what is wrong.
        """
        config = self._config
        tokenizer, defaults = await asyncio.to_thread(_load, config)
        if config.otlp_endpoint:
            self._exporter = otlp_exporter(config.otlp_endpoint, config.router_id)
        listener = Listener(config.host, config.http_port, "http_port")
        self._dispatcher = dispatcher = Dispatcher(config, self._placement, tokenizer, self._follow_readiness)
        if self._exporter is not None:
            dispatcher.metrics.traces.export = self._exporter.export
        self._admission = Admission(
            config, tokenizer, defaults, lambda: dispatcher.pool.model, dispatcher.metrics.refused
        )
        try:
            grpc_port = await self._open_grpc()
            self._http = HttpServer(make_app(config, self._admission, self._dispatcher), listener)
            await self._http.begin()
        except FailedPrecondition:
            listener.close()
            await self._grpc.stop(None)
            self._admission.close()
            await self._dispatcher.close()
            await self._close_exporter()
            raise
        self._follow_readiness()
        endpoints = RouterEndpoints(address_of(config.host, grpc_port), listener.address)
        if not config.api_keys and not is_loopback(config.host):
            log.warning("both doors are open to whoever reaches %s: no API key is asked for", config.host)
        log.info("router %s serves gRPC on %s, HTTP on %s", config.router_id, *_pair(endpoints))
        return endpoints

    async def stop(self, grace_s: float) -> None:
        """Turn NOT_SERVING, let running requests end for `grace_s` seconds, then fail the rest with `Unavailable`."""
        await self._health.enter_graceful_shutdown()
        self._http.leave(math.ceil(grace_s + _GOODBYE_S))
        grpc_closed = asyncio.create_task(self._grpc.stop(grace_s + _GOODBYE_S))
        await self._dispatcher.drain(grace_s)
        await grpc_closed
        await self._http.gone()
        await self._dispatcher.close()
        await asyncio.gather(*self._background, return_exceptions=True)
        self._admission.close()
        await self._close_exporter()

    @property
    def ready(self) -> bool:
        """Whether a request could be served now."""
        return self._dispatcher.pool.ready

    async def _close_exporter(self) -> None:
        if self._exporter is not None:
            await asyncio.to_thread(self._exporter.close)

    async def _open_grpc(self) -> int:
        config = self._config
        self._grpc = open_server(tokens=frozenset(config.api_keys), open_methods=(_HEALTH_METHODS,))
        servicer = InferenceServicer(config, self._admission, self._dispatcher)
        inference_pb2_grpc.add_InferenceServicer_to_server(servicer, self._grpc)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._grpc)
        port = _bind_grpc(self._grpc, config.host, config.grpc_port)
        await self._health.set(SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._grpc.start()
        return port

    def _follow_readiness(self) -> None:
        ready = self._dispatcher.pool.ready
        if ready == self._ready:
            return
        self._ready = ready
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        task = asyncio.create_task(self._health.set(SERVICE, status))
        self._background.add(task)
        task.add_done_callback(self._background.discard)


async def serve(config: RouterConfig, grace_s: float = 10.0) -> None:
    """Run a router until SIGTERM or SIGINT."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)
    for name in signals:
        loop.add_signal_handler(name, stopping.set)
    server = RouterServer(config)
    try:
        await server.start()
        await stopping.wait()
        await server.stop(grace_s)
    finally:
        for name in signals:
            loop.remove_signal_handler(name)


def _load(config: RouterConfig) -> tuple[Tokenizer, GenerationDefaults]:
    return Tokenizer(config.model), read_generation_defaults(config.model)


def _bind_grpc(server: grpc.aio.Server, host: str, port: int) -> int:
    address = address_of(host, port)
    try:
        return server.add_insecure_port(address)
    except RuntimeError as error:
        message = f"grpc_port: {address} cannot be used ({error}); choose another port"
        raise FailedPrecondition(message) from error


def _pair(endpoints: RouterEndpoints) -> tuple[str, str]:
    return endpoints.grpc_address, endpoints.http_address
