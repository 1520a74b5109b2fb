"""The router's process: a thin Ray actor around `router.server.RouterServer`."""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kv_transfer.nixl_backend.processes import this_process
from tandem.cluster.ray_processes.ray_process import RayProcess, actor_class, in_group
from tandem.cluster.supervision.process_supervisor import Process
from tandem.logging.logs import LogConfig, begin_log
from tandem.net.heap import freeze_gc, keep_imports
from tandem.net.turns import set_switch_interval
from tandem.settings.cluster import ClusterSettings

if TYPE_CHECKING:
    from router.api.listeners import RouterEndpoints
    from router.config import RouterConfig
    from router.server import RouterServer

log = logging.getLogger(__name__)


class RouterActor:
    """The Ray actor that runs one router; `RayProcess` describes its methods."""

    def __init__(
        self,
        config: "RouterConfig",
        incarnation: int,
        log_config: LogConfig,
        stop_grace_s: float = 0.0,
    ) -> None:
        """Configure logging; requests in flight have `stop_grace_s` seconds when the router stops."""
        begin_log(log_config, config.name, incarnation)
        self._config = config
        self._stop_grace_s = stop_grace_s
        self._stopped = asyncio.Event()
        self._prepared: RouterServer | None = None
        self._server: RouterServer | None = None
        self._starting: asyncio.Future[RouterEndpoints] | None = None

    async def pid(self) -> int:
        """Return the process id of this process."""
        return os.getpid()

    async def identity(self) -> str:
        """Return the identity of this process, with which its supervisor checks that it kills the right process."""
        return this_process()

    async def works(self) -> None:
        """Return at once; the event loop that runs this call is the one that serves clients."""

    async def prepare(self) -> None:
        """Import the router and load the tokenizer, so that `start` only has to open the listeners."""
        set_switch_interval()
        with keep_imports():
            from router.server import RouterServer

        server = RouterServer(self._config)
        await server.prepare()
        self._prepared = server
        freeze_gc()
        log.info("router %s is ready to open its listeners", self._config.router_id)

    async def start(self) -> "RouterEndpoints":
        """Open gRPC and HTTP and return their addresses; if they are open already, only return the addresses."""
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._start())
        return await asyncio.shield(self._starting)

    async def _start(self) -> "RouterEndpoints":
        if self._prepared is None:
            await self.prepare()
        assert self._prepared is not None
        endpoints = await self._prepared.start()
        self._server = self._prepared
        freeze_gc()
        return endpoints

    async def progress(self) -> tuple[str, float]:
        """Return a constant progress: a router starts in one step."""
        return "opening the listeners", 0.0

    async def run(self) -> None:
        """Wait until `stop` has completed."""
        await self._stopped.wait()

    async def stop(self) -> None:
        """Close gRPC and HTTP; calls still in flight after the grace end with UNAVAILABLE."""
        if self._server is not None:
            await self._server.stop(self._stop_grace_s)
        self._stopped.set()


class RouterProcess:
    """Spawns the routers of one controller on this node; all use the ports that the first of them opened.

    The actors are detached, so that they outlive a controller that dies. Owned by the controller.
    """

    def __init__(self, config: ClusterSettings, token: str, number: int = 0, group: Any = None) -> None:
        """Create the spawner; `number` is the number of the controller, `group` the placement group of its routers."""
        self._cluster = config
        self._token = token
        self._prefix = f"router-{number}-"
        self._group = group
        self.controller_address = ""
        """The controller's listener, host:port; set before the first `spawn`."""
        self.listeners = "", "", ""
        """The addresses of gRPC, of HTTP, and of metrics and traces if HTTP uses TLS; empty until the first start."""
        self.on_open: Callable[[str], None] = lambda _: None
        """Called with the address of the router's metrics each time a router opens its listeners."""

    async def spawn(self, incarnation: int) -> Process:
        """Spawn a new router process, which reuses the ports of the previous one."""
        return self._process_of(self._create(incarnation))

    async def spawn_standby(self, incarnation: int) -> tuple[Process, Process]:
        """Spawn a standby router; return two handles on its process, to prepare it and to start it; see `Standby`.

        The preparation does everything except opening the listeners.
        """
        actor = self._create(incarnation)
        return RayProcess(actor, start=actor.prepare.remote), self._process_of(actor)

    async def adopt(self, incarnation: int) -> Process | None:
        """Return the router of this incarnation, or None if it is dead; kill all other routers of this `tandem up`."""
        import ray

        name, living = f"{self._prefix}{incarnation}", await asyncio.to_thread(ray.util.list_named_actors)
        for living_name in living:
            if living_name.startswith(self._prefix) and living_name != name:
                with contextlib.suppress(ValueError):  # it ended in the meantime
                    ray.kill(ray.get_actor(living_name), no_restart=True)
        try:
            return self._process_of(ray.get_actor(name))
        except ValueError:
            return None

    def _create(self, incarnation: int) -> Any:
        options = {"name": f"{self._prefix}{incarnation}", "num_cpus": 0, "lifetime": "detached"}
        cluster = self._cluster
        settings = self._config(incarnation), incarnation, cluster.log_of("router"), cluster.stop_grace_s
        return actor_class(RouterActor).options(**options, scheduling_strategy=in_group(self._group)).remote(*settings)

    def _process_of(self, actor: Any) -> RayProcess:
        return RayProcess(actor, on_start=self._opened)

    def _opened(self, opened: "RouterEndpoints") -> None:
        self.listeners = opened.grpc_address, opened.http_address, opened.operations_address
        self.on_open(opened.operations_address or opened.http_address)

    def _config(self, incarnation: int) -> "RouterConfig":
        from router.config import RouterConfig

        cluster = self._cluster
        config = RouterConfig(
            **cluster.router.values(),
            router_id=f"router-{incarnation}",
            served=cluster.served,
            engines_on_cpu=cluster.engine.on_cpu,
            prefix_cache=cluster.worker.prefix_cache,
            controller_address=self.controller_address,
            secrets=replace(cluster.secrets, token=self._token),
        )
        grpc_address, http_address, operations_address = self.listeners
        if not grpc_address:
            return config
        config = replace(config, grpc_port=_port(grpc_address), http_port=_port(http_address))
        return replace(config, operations_port=_port(operations_address)) if operations_address else config


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])
