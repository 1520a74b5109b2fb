"""The controller: one Ray actor that keeps the router and every worker alive and tracks which workers serve.

The controller handles only processes: requests and their data never pass through it. If the config lets workers outlive
their controller, a cluster may have several controllers, one for each `tandem up`. Each controller keeps its own router
alive, and the youngest controller supervises the workers (`leadership/election.py`).
"""

import asyncio
import os
from functools import partial

from tandem.cluster.background import begin, going_on
from tandem.cluster.leadership.election import LeaderElection
from tandem.cluster.leadership.forwarding import ForwardingServicer
from tandem.cluster.metrics import ClusterMetrics
from tandem.cluster.ray_processes.controllers import Controllers, NoControllers, RayControllers
from tandem.cluster.ray_processes.orphaned_workers import RayOrphanedWorkers
from tandem.cluster.ray_processes.ray_process import node_address
from tandem.cluster.ray_processes.router_actor import RouterProcess
from tandem.cluster.supervision.health import ClusterHealth
from tandem.cluster.supervision.incarnations import Incarnations, generation_of
from tandem.cluster.supervision.process_supervisor import END_S, ProcessSupervisor
from tandem.cluster.supervision.registry import Registry
from tandem.cluster.supervision.standby import Standby
from tandem.cluster.supervision.takeover import Takeover
from tandem.cluster.worker_supervisor import ControllerConfig, WorkerSupervisor
from tandem.logging.logs import begin_log
from tandem.net.address import address_of, is_loopback
from tandem.net.rpc import listen, open_server
from tandem.net.security.credentials import reading_keys
from tandem.protocol.generated.tandem.v1 import cluster_pb2_grpc

_STANDBY = "keeping a standby of the router"


class Controller:
    """The controller: starts, watches and restarts the router and the workers, and owns their processes.

    It runs as a Ray actor that `ControllerProcess` creates; all methods run on the actor's event loop.
    """

    def __init__(self, config: ControllerConfig) -> None:
        cluster = config.cluster
        begin_log(cluster.log_of("controller"), "controller")
        self._config = config
        self._registry = Registry()
        self._server = open_server()
        self._router = RouterProcess(cluster, config.token, config.number, config.router_group)
        incarnations = Incarnations()
        self._router_keeper = ProcessSupervisor(
            "router",
            self._router.spawn,
            self._router_gone,
            hang_deadline_s=cluster.hang_deadline_s,
            incarnations=incarnations,
        )
        self._standby = Standby(
            self._router_keeper, self._router.spawn_standby, incarnations, hang_deadline_s=cluster.hang_deadline_s
        )
        self._incarnations = incarnations
        """The source of the routers' incarnation numbers."""
        self._router_lived = False
        """True if this controller has adopted the router of a previous controller that died."""
        self._supervisor = WorkerSupervisor(config, self._registry, RayOrphanedWorkers())
        others: Controllers = RayControllers() if cluster.worker.outlive_s else NoControllers()
        self._election = LeaderElection(config.number, others, self._supervisor)
        self._taking_over: asyncio.Task[None] | None = None
        self._runs: list[asyncio.Task[None]] = []
        """The tasks that supervise the router and the standby router."""
        self._metrics: ClusterMetrics | None = None
        self._address = ""
        self._metrics_address = ""
        self._stopped = asyncio.Event()

    async def pid(self) -> int:
        """Return the process id of this process."""
        return os.getpid()

    async def start(self) -> str:
        """Open the gRPC listener, begin to start or take over all processes, and return the listener's host:port."""
        cluster, token = self._config.cluster, self._config.token
        supervisor, elsewhere = self._supervisor, self._election.decided
        host = node_address()
        self._metrics = metrics = self._make_metrics(host)
        servicer = ForwardingServicer(
            self._registry, supervisor.operator, supervisor.adapters, metrics.text, token=token, elsewhere=elsewhere
        )
        cluster_pb2_grpc.add_ClusterServicer_to_server(servicer, self._server)
        port = listen(self._server, address_of(host, cluster.controller_port), token)
        self._address = address_of(host, port)
        await self._server.start()
        self._router.controller_address = self._address
        self._metrics_address = await metrics.open(host, cluster.metrics_port)
        self._supervisor.open(self._address, metrics)
        self._router.on_open = partial(metrics.opened, "router", "router")
        await self._continue_router()
        self._runs = [asyncio.create_task(self._router_keeper.run(END_S + cluster.stop_grace_s))]
        self._taking_over = asyncio.create_task(self._election.begin())
        return self._address

    async def serves(self) -> None:
        """Mark the cluster's start as complete, because every required process serves, and start the standby router."""
        self._runs.append(begin(going_on(self._standby.run, _STANDBY), _STANDBY))
        self._supervisor.started.set()
        self._election.started()

    async def release_workers(self) -> Takeover:
        """Release the workers to another controller; see `LeaderElection.release_workers`."""
        return await self._election.release_workers()

    async def wait_until_decided(self) -> str:
        """Wait until this controller leads or knows the leader; return this controller's address.

        A leader is known once it has taken over the workers. Raises Unavailable if this controller stops.
        """
        await self._election.wait_until_decided()
        return self._address

    async def _continue_router(self) -> None:
        """Adopt the live router of this controller's dead predecessor, and kill the predecessor's other routers."""
        before = self._config.before
        if before is None:
            return
        self._incarnations.begin(generation_of(before.router.incarnation) + 1)
        self._router.listeners = before.grpc_address, before.http_address, before.operations_address
        process = await self._router.adopt(before.router.incarnation)
        if process is not None:
            self._router_keeper.adopt(before.router.incarnation, process)
            self._router_lived = True

    def _router_gone(self, incarnation: int) -> None:
        if self._metrics is not None:
            self._metrics.gone("router")
        if (standby := self._standby.use(incarnation)) is not None:
            self._router_keeper.adopt(*standby)

    def _make_metrics(self, host: str) -> ClusterMetrics:
        cluster, token = self._config.cluster, self._config.token
        return ClusterMetrics(
            cluster.served.name,
            token,
            reading_keys(
                cluster.secrets.metrics_key, token, guarded=cluster.router.guarded, loopback=is_loopback(host)
            ),
            lambda: [
                ("router", self._router_keeper.health()),
                *((slot.role.value, health) for slot, health in self._supervisor.fleet.health()),
            ],
            lambda: {worker.peer.worker_id: worker.role.value for worker in self._registry.membership().workers},
        )

    async def health(self) -> ClusterHealth:
        """Return the health of all processes.

        Raises the error that keeps this controller from taking over the workers, if there is one.
        """
        begun, supervisor = self._taking_over, self._supervisor
        filled = begun is not None and begun.done()
        if begun is not None and filled and not begun.cancelled():
            begun.result()
        grpc_address, http_address, operations_address = self._router.listeners
        return ClusterHealth(
            self._router_keeper.health(),
            grpc_address,
            http_address,
            tuple(health for _, health in supervisor.fleet.health()),
            self._metrics_address,
            filled,
            supervisor.taken_over | ({"router"} if self._router_lived else frozenset()),
            operations_address,
            self._election.kept_at,
            supervisor.state if filled and self._election.keeps else None,
        )

    async def run(self) -> None:
        """Wait until `stop` has completed; the launcher keeps this call pending to notice the controller's death."""
        await self._stopped.wait()

    async def stop(self, *, leave_workers: bool = False) -> bool:
        """Stop the router, then the workers, then the listener; return True if the workers keep running.

        Workers keep running only if the config lets them outlive their controller, and then in three cases:
        `leave_workers` is set; another controller runs; or this controller's start is not complete and another
        controller started the workers.
        """
        if self._taking_over is not None:
            self._taking_over.cancel()
            await asyncio.gather(self._taking_over, return_exceptions=True)
        self._standby.stop()
        self._router_keeper.stop()
        await asyncio.gather(*self._runs)
        # The election ends after the router: another controller may take over while the router finishes requests.
        await self._election.stop()
        leave = await self._leaves_workers(asked=leave_workers)
        await self._supervisor.stop(end_workers=not leave)
        await self._server.stop(grace=0.5)
        if self._metrics is not None:
            await self._metrics.close()
        self._stopped.set()
        return leave

    async def _leaves_workers(self, *, asked: bool) -> bool:
        if not self._config.cluster.worker.outlive_s:
            return False
        supervisor, election = self._supervisor, self._election
        others_began = not supervisor.started.is_set() and (bool(supervisor.taken_over) or not election.keeps)
        return asked or others_began or not await election.alone()
