"""The router process: the gRPC and HTTP listeners and one dispatcher, on one event loop."""

from __future__ import annotations

import asyncio
import logging
import signal
from dataclasses import replace
from functools import partial

from starlette.types import ASGIApp

from router.access.audit_log import AuditLog
from router.access.callers import Callers
from router.api.app import make_app
from router.api.grpc.access import GrpcAccess
from router.api.grpc.service import InferenceServicer, add_inference
from router.api.http_access import only_operations
from router.api.listeners import Listeners, RouterEndpoints
from router.config import RouterConfig
from router.observability.otlp import TraceExporter, otlp_exporter
from router.placement.policy import PlacementPolicy
from router.requests.dispatch import Dispatcher
from router.requests.validation import RequestValidator
from router.text.tokenizer import Tokenizer
from tandem.metrics import families as f
from tandem.net.address import is_loopback
from tandem.net.http.server import HttpServer, Listener
from tandem.net.security.server_tls import ServerTls
from tandem.protocol.errors import TandemError
from tandem.tokenizers.model_folder import GenerationDefaults, read_generation_defaults

log = logging.getLogger(__name__)


class RouterServer:
    """One router, which owns all its parts; start it once and stop it once, on the same event loop."""

    def __init__(self, config: RouterConfig, policy: PlacementPolicy | None = None) -> None:
        """`policy` chooses the workers; None creates a policy in the configured mode."""
        self._config = config
        self._policy = policy or PlacementPolicy(config.mode)
        self._text: tuple[Tokenizer, GenerationDefaults] | None = None
        self._ready: bool | None = None
        self._exporter: TraceExporter | None = None
        self._audit: AuditLog | None = None
        self._opened: Listeners | None = None
        self._operations: HttpServer | None = None

    async def prepare(self) -> None:
        """Load the tokenizer, which takes most of the time of `start`. May be called several times."""
        if self._text is None:
            self._text = await asyncio.to_thread(_load, self._config)

    async def start(self) -> RouterEndpoints:
        """Load the tokenizer, watch the cluster, and open the listeners.

        Workers may register later; until then requests fail with Unavailable. Raises ModelError if the model folder is
        unusable, and FailedPrecondition if a port is taken.
        """
        config = self._config
        await self.prepare()
        assert self._text is not None
        tokenizer, defaults = self._text
        if config.otlp_endpoint:
            self._exporter = otlp_exporter(config.otlp_endpoint, config.router_id)
        self._dispatcher = dispatcher = Dispatcher(config, self._policy, tokenizer, self._follow_readiness)
        if self._exporter is not None:
            dispatcher.metrics.traces.export = self._exporter.export
        self._validator = RequestValidator(
            config, tokenizer, defaults, lambda: dispatcher.pool.model, dispatcher.metrics.refused
        )
        try:
            self._callers = Callers(config.key_source, dispatcher.metrics.refused)
            if config.audit_log is not None:
                self._audit = AuditLog(config.audit_log, dispatcher.metrics.registry)
            app = make_app(config, self._validator, dispatcher, self._callers, self._audit)
            endpoints = await self._open(app)
        except TandemError:
            await self._close()
            raise
        self._follow_readiness()
        if not config.guarded and not is_loopback(config.host):
            log.warning("gRPC and HTTP on %s require no API key: any client that reaches them has access", config.host)
        log.info("router %s serves gRPC on %s, HTTP on %s", config.router_id, *_pair(endpoints))
        return endpoints

    async def stop(self, grace_s: float) -> None:
        """Set NOT_SERVING, wait up to `grace_s` seconds for running requests, then fail the rest with Unavailable."""
        assert self._opened is not None
        await self._opened.leave(grace_s)
        await self._dispatcher.drain(grace_s)
        await self._opened.gone()
        if self._operations is not None:
            self._operations.leave(1)
            await self._operations.gone()
        await self._close()

    @property
    def ready(self) -> bool:
        """True if a request would be served now."""
        return self._dispatcher.refusal is None

    async def _close(self) -> None:
        await self._dispatcher.close()
        self._validator.close()
        for writer in (self._exporter, self._audit):
            if writer is not None:
                await asyncio.to_thread(writer.close)

    async def _open(self, app: ASGIApp) -> RouterEndpoints:
        """Open the listeners; with TLS, also open a plain HTTP listener for probes, metrics and traces."""
        config = self._config
        if config.tls is None:
            return await self._open_listeners(app)
        tls = ServerTls(config.tls)
        self._dispatcher.metrics.registry.read(lambda: {f.TLS_CERTIFICATE_EXPIRES: tls.current().expires.timestamp()})
        operations = Listener(config.host, config.operations_port, "operations_port")
        try:
            endpoints = await self._open_listeners(app)
        except TandemError:
            operations.close()
            raise
        self._operations = HttpServer(only_operations(app), operations, config.listeners)
        await self._operations.begin()
        return replace(endpoints, operations_address=operations.address)

    async def _open_listeners(self, app: ASGIApp) -> RouterEndpoints:
        listeners = self._listeners(app)
        endpoints = await listeners.open()
        self._opened = listeners
        return endpoints

    def _listeners(self, app: ASGIApp) -> Listeners:
        config = self._config
        ports = config.grpc_port, config.http_port
        inference = GrpcAccess(InferenceServicer(config, self._validator, self._dispatcher), self._callers, self._audit)
        return Listeners(
            config.host,
            ports,
            check=self._callers.check,
            rejected=inference.rejected,
            add_inference=partial(add_inference, inference),
            app=app,
            limits=config.listeners,
            tls=config.tls,
        )

    def _follow_readiness(self) -> None:
        ready = self.ready
        if ready != self._ready and self._opened is not None:
            self._ready = ready
            self._opened.set_serving(ready)


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
    defaults = (
        read_generation_defaults(config.served.model) if config.generation_config == "auto" else GenerationDefaults()
    )
    return Tokenizer(config.served.tokenizer_folder, config.chat_template), defaults


def _pair(endpoints: RouterEndpoints) -> tuple[str, str]:
    return endpoints.grpc_address, endpoints.http_address
