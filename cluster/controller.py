"""The controller: one Ray actor that keeps the router and every worker alive and knows who serves.

It only ever speaks about processes. Requests and their data never pass through it.
"""

import asyncio
import os
import time
from dataclasses import dataclass
from functools import partial

from cluster.config import ClusterConfig
from cluster.duties import Duties
from cluster.health import ClusterHealth
from cluster.keeper import Keeper, Process
from cluster.metrics import ClusterMetrics
from cluster.modes import Sharing
from cluster.operator import Operator
from cluster.ray_process import node_address, node_is_up
from cluster.registry import Registry
from cluster.roles import Slot
from cluster.router_actor import RouterProcess
from cluster.service import ClusterServicer
from cluster.worker_actors import WorkerActors
from cluster.worker_calls import WorkerCalls
from wire.address import address_of, is_loopback
from wire.credentials import reading_keys
from wire.generated.tandem.v1 import cluster_pb2_grpc
from wire.logs import LogFormat, begin_log
from wire.messages import PeerRef
from wire.rpc import open_server


@dataclass(frozen=True, slots=True)
class ControllerConfig:
    """What the controller keeps alive."""

    cluster: ClusterConfig
    """Settings of the whole cluster."""
    slots: tuple[Slot, ...]
    """The workers."""
    token: str
    """The cluster's secret: whoever registers or watches shows it."""


class Controller:
    """Starts, watches and restarts; `Cluster` makes a Ray actor of it. Owns the processes it keeps."""

    def __init__(self, config: ControllerConfig) -> None:
        begin_log(config.cluster.log_file("controller"), LogFormat(config.cluster.log_format), "controller")
        self._config = config
        self._registry = Registry(first_revision=time.time_ns())
        self._server = open_server(tokens=frozenset({config.token}))
        self._router = RouterProcess(config.cluster, config.token)
        self._keepers: tuple[Keeper, ...] = ()
        self._worker_keepers: dict[str, Keeper] = {}
        calls, roles = WorkerCalls(config.token), {slot.worker_id: slot.role for slot in config.slots}
        self._duties = Duties(self._registry, Sharing.of(config.cluster), roles, calls.set_duty)
        self._operator = Operator(self._registry, self._duties, self._worker_keepers, calls, node_is_up)
        self._seeing_to_duties: asyncio.Task[None] | None = None
        self._runs: list[asyncio.Task[None]] = []
        self._metrics: ClusterMetrics | None = None
        self._metrics_address = ""
        self._stopped = asyncio.Event()

    async def pid(self) -> int:
        """This process."""
        return os.getpid()

    async def start(self) -> str:
        """Open the controller's door, begin to start everything at once; the door's host:port."""
        cluster_pb2_grpc.add_ClusterServicer_to_server(ClusterServicer(self._registry, self._operator), self._server)
        host = node_address()
        wanted = address_of(host, self._config.cluster.controller_port)
        address = address_of(host, self._server.add_insecure_port(wanted))
        await self._server.start()
        self._router.controller_address = address
        self._metrics = metrics = self._make_metrics(host)
        self._metrics_address = await metrics.open(host, self._config.cluster.metrics_port)
        self._router.on_open = partial(metrics.opened, "router", "router")
        workers = WorkerActors(
            self._config.cluster,
            address,
            self._config.token,
            lambda slot, where: metrics.opened(slot.worker_id, slot.role, where),
        )
        self._keepers = (
            Keeper("router", self._router.spawn, lambda _: metrics.gone("router")),
            *(
                Keeper(slot.worker_id, partial(self._spawn, workers, slot), partial(self._forget, slot.worker_id))
                for slot in self._config.slots
            ),
        )
        self._worker_keepers.update({keeper.name: keeper for keeper in self._keepers[1:]})
        self._runs = [asyncio.create_task(keeper.run()) for keeper in self._keepers]
        self._seeing_to_duties = asyncio.create_task(self._duties.run())
        return address

    async def _spawn(self, workers: WorkerActors, slot: Slot, incarnation: int) -> Process:
        """With the duty that it is to have now, not with that of the cluster's start."""
        return await workers.spawn(slot, self._duties.wanted(slot.worker_id), incarnation)

    def _forget(self, worker_id: str, incarnation: int) -> None:
        """Routers hear of a death as soon as its keeper does."""
        self._registry.unregister(PeerRef(worker_id, incarnation))
        if self._metrics is not None:
            self._metrics.gone(worker_id)

    def _make_metrics(self, host: str) -> ClusterMetrics:
        cluster, token = self._config.cluster, self._config.token
        roles = ("router", *(slot.role.value for slot in self._config.slots))
        return ClusterMetrics(
            cluster.model_name or cluster.model.name,
            token,
            reading_keys(cluster.metrics_key, cluster.api_keys, token, loopback=is_loopback(host)),
            lambda: zip(roles, (keeper.health() for keeper in self._keepers), strict=False),
            lambda: {each.peer.worker_id: each.role.value for each in self._registry.membership().workers},
        )

    async def health(self) -> ClusterHealth:
        """How everything is doing now."""
        router, *workers = (keeper.health() for keeper in self._keepers)
        doors = self._router.grpc_address, self._router.http_address
        return ClusterHealth(router, *doors, tuple(workers), self._metrics_address)

    async def run(self) -> None:
        """Pending as long as the controller lives and is wanted."""
        await self._stopped.wait()

    async def stop(self) -> None:
        """End the router, then the workers, then the door; returns when all are gone."""
        if self._seeing_to_duties is not None:
            self._seeing_to_duties.cancel()
        for keeper, run in zip(self._keepers, self._runs, strict=True):
            keeper.stop()
            if keeper.name == "router":
                await run
        await asyncio.gather(*self._runs)
        await self._server.stop(grace=0.5)
        if self._metrics is not None:
            await self._metrics.close()
        self._stopped.set()
