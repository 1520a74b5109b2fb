"""The controller: one Ray actor that keeps the router and every worker alive and knows who serves.

It only ever speaks about processes. Requests and their data never pass through it.
"""

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from cluster.config import ClusterConfig
from cluster.duties import Duties
from cluster.fleet import Fleet
from cluster.health import ClusterHealth
from cluster.keeper import END_S, Keeper, Process
from cluster.metrics import ClusterMetrics
from cluster.modes import Sharing
from cluster.operator import Operator
from cluster.planner_config import PlannerMode
from cluster.planning import Planning
from cluster.ray_process import node_address, node_is_up
from cluster.registry import Registry
from cluster.roles import Slot, another
from cluster.router_actor import RouterProcess
from cluster.service import ClusterServicer
from cluster.worker_actors import WorkerActors
from cluster.worker_calls import WorkerCalls
from wire.address import address_of, is_loopback
from wire.credentials import reading_keys
from wire.generated.tandem.v1 import cluster_pb2_grpc
from wire.logs import LogFormat, begin_log
from wire.messages import PeerRef, Role
from wire.rpc import open_server


@dataclass(frozen=True, slots=True)
class ControllerConfig:
    """What the controller keeps alive."""

    cluster: ClusterConfig
    """Settings of the whole cluster."""
    slots: tuple[Slot, ...]
    """The workers that it starts with."""
    gpus: int
    """Of this host, where all workers are on it."""
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
        self._router_keeper = Keeper("router", self._router.spawn, self._router_gone)
        self._workers = WorkerActors(config.cluster, config.token, self._serves_metrics)
        self._fleet = Fleet(config.slots, self._keeper, self._new_slot, self._workers.release)
        calls, roles = WorkerCalls(config.token), {slot.worker_id: slot.role for slot in config.slots}
        self._duties = Duties(self._registry, Sharing.of(config.cluster), roles, calls.set_duty)
        self._operator = Operator(self._registry, self._duties, self._fleet, calls, node_is_up)
        self._seeing_to_duties: asyncio.Task[None] | None = None
        self._planning: asyncio.Task[None] | None = None
        self._router_run: asyncio.Task[None] | None = None
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
        self._router.controller_address = self._workers.controller_address = address
        self._metrics = metrics = self._make_metrics(host)
        self._metrics_address = await metrics.open(host, self._config.cluster.metrics_port)
        self._planning = self._begin_planning(metrics)
        self._router.on_open = partial(metrics.opened, "router", "router")
        grace_s = END_S + self._config.cluster.stop_grace_s
        self._router_run = asyncio.create_task(self._router_keeper.run(grace_s))
        self._fleet.start()
        self._seeing_to_duties = asyncio.create_task(self._duties.run())
        return address

    def _begin_planning(self, metrics: ClusterMetrics) -> asyncio.Task[None] | None:
        cluster = self._config.cluster
        if cluster.planner.mode is PlannerMode.OFF:
            return None
        planning = Planning(
            cluster.planner,
            cluster.slo_classes,
            self._operator,
            membership=self._registry.membership,
            scrape=metrics.text,
        )
        planning.tell(metrics.board)
        return asyncio.create_task(planning.run())

    def _keeper(self, slot: Slot) -> Keeper:
        return Keeper(slot.worker_id, partial(self._spawn, slot), partial(self._forget, slot.worker_id))

    def _new_slot(self, role: Role, slots: Sequence[Slot]) -> Slot:
        return another(self._config.cluster, role, slots, self._config.gpus)

    async def _spawn(self, slot: Slot, incarnation: int) -> Process:
        """With the duty that it is to have now, not with that of the cluster's start."""
        return await self._workers.spawn(slot, self._duties.wanted(slot.worker_id), incarnation)

    def _forget(self, worker_id: str, incarnation: int) -> None:
        """Routers hear of a death as soon as its keeper does."""
        self._registry.unregister(PeerRef(worker_id, incarnation))
        if self._metrics is not None:
            self._metrics.gone(worker_id)

    def _router_gone(self, _incarnation: int) -> None:
        if self._metrics is not None:
            self._metrics.gone("router")

    def _serves_metrics(self, slot: Slot, address: str) -> None:
        if self._metrics is not None:
            self._metrics.opened(slot.worker_id, slot.role, address)

    def _make_metrics(self, host: str) -> ClusterMetrics:
        cluster, token = self._config.cluster, self._config.token
        return ClusterMetrics(
            cluster.model_name or cluster.model.name,
            token,
            reading_keys(cluster.metrics_key, cluster.api_keys, token, loopback=is_loopback(host)),
            lambda: [
                ("router", self._router_keeper.health()),
                *((slot.role.value, health) for slot, health in self._fleet.health()),
            ],
            lambda: {each.peer.worker_id: each.role.value for each in self._registry.membership().workers},
        )

    async def health(self) -> ClusterHealth:
        """How everything is doing now."""
        doors = self._router.grpc_address, self._router.http_address
        workers = tuple(health for _, health in self._fleet.health())
        return ClusterHealth(self._router_keeper.health(), *doors, workers, self._metrics_address)

    async def run(self) -> None:
        """Pending as long as the controller lives and is wanted."""
        await self._stopped.wait()

    async def stop(self) -> None:
        """End the router, then the workers, then the door; returns when all are gone."""
        for task in filter(None, (self._planning, self._seeing_to_duties)):
            task.cancel()
        self._router_keeper.stop()
        if self._router_run is not None:
            await self._router_run
        await self._fleet.stop()
        await self._server.stop(grace=0.5)
        if self._metrics is not None:
            await self._metrics.close()
        self._stopped.set()
