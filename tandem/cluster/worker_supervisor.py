"""The workers that one controller supervises: it takes them over or starts them, and assigns their roles."""

import asyncio
import logging
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from tandem.cluster.background import begin, going_on
from tandem.cluster.leadership.forwarding import mirror
from tandem.cluster.metrics import ClusterMetrics
from tandem.cluster.operations.adapters import Adapters
from tandem.cluster.operations.assignments import Assignments
from tandem.cluster.operations.initial_workers import InitialWorkers, inherit, restore, slot_of
from tandem.cluster.operations.operator import Operator
from tandem.cluster.operations.worker_slots import Fleet
from tandem.cluster.planning import Planning
from tandem.cluster.ray_processes.orphaned_workers import OrphanedWorker, OrphanedWorkers, fitting
from tandem.cluster.ray_processes.ray_process import node_is_up
from tandem.cluster.ray_processes.worker_actors import WorkerActors
from tandem.cluster.supervision.health import ClusterHealth, Phase
from tandem.cluster.supervision.incarnations import Incarnations, generation_of
from tandem.cluster.supervision.modes import Topology
from tandem.cluster.supervision.process_supervisor import Process, ProcessSupervisor
from tandem.cluster.supervision.registry import Registry
from tandem.cluster.supervision.roles import Slot, another
from tandem.cluster.supervision.size import SizeChange
from tandem.cluster.supervision.takeover import ControllerState, Takeover
from tandem.cluster.supervision.worker_calls import WorkerCalls
from tandem.protocol.errors import TandemError
from tandem.protocol.messages import AdapterFacts, PeerRef, Role
from tandem.protocol.mode import Mode
from tandem.settings.cluster import ClusterSettings
from tandem.settings.planner import PlannerMode
from tandem.worker.reporting.description import Settings, WorkerDescription, differences, served_of, tuning_of

if TYPE_CHECKING:
    from tandem.worker.config import WorkerConfig

log = logging.getLogger(__name__)

LOOK_S = 0.02
GRACE_S = 60.0
"""Seconds that taken-over workers have for their requests before they are restarted or removed."""

_ASSIGNMENTS = "sending workers their assignments"
_ADAPTERS = "having workers load adapters"
Found = Mapping[str, tuple[OrphanedWorker, WorkerDescription]]


@dataclass(frozen=True, slots=True)
class ControllerConfig:
    """Settings of one controller and of the cluster that it keeps alive."""

    cluster: ClusterSettings
    """Settings of the whole cluster."""
    slots: tuple[Slot, ...]
    """The slots of the initial workers."""
    gpus: int
    """The number of GPUs of this host; used only if all workers run on this host."""
    token: str
    """The cluster's secret, which every client that registers or watches has to present."""
    number: int = 0
    """The number of this controller in its cluster; a higher number means a younger controller."""
    router_group: Any = None
    """The placement group of routers, on this host; it ends with `tandem up`."""
    before: ClusterHealth | None = None
    """The last health report of the controller that this one replaces; None = there was no earlier controller."""


class WorkerSupervisor:
    """Owns the workers from `take_over` until `release_workers` or `stop`. Belongs to the controller's event loop."""

    def __init__(self, config: ControllerConfig, registry: Registry, left: OrphanedWorkers) -> None:
        cluster = config.cluster
        self._config = config
        self._registry = registry
        self._left = left
        self._before = None if config.before is None else config.before.state
        """The state to restore at the first `take_over`, unless another controller hands the workers over."""
        self._incarnations = Incarnations()
        self._workers = WorkerActors(cluster, config.token, self._serves_metrics)
        self.fleet = Fleet(self._keeper, self._new_slot, self._workers.release)
        calls = WorkerCalls(config.token)
        self._assignments = Assignments(
            registry, Topology.of(cluster), {}, calls.set_assignment, cluster.prefill_only_option
        )
        self.operator = Operator(registry, self._assignments, self.fleet, calls, node_is_up)
        self.adapters = Adapters(
            registry,
            calls,
            allowed=cluster.engine.runtime_loras,
            first=[AdapterFacts(name, "", str(path)) for name, path in cluster.engine.loras],
            model_names=cluster.served.names,
        )
        self.taken_over: frozenset[str] = frozenset()
        """The names of the workers that another controller started and that this controller has taken over."""
        self.started = asyncio.Event()
        """Set once the cluster serves; from then on taken-over workers may be changed."""
        self._metrics: ClusterMetrics | None = None
        self._planner: Planning | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def open(self, address: str, metrics: ClusterMetrics) -> None:
        """Set the controller's address for workers, and the cluster's metrics; call it before all other methods."""
        self._workers.controller_address = address
        self._metrics = metrics
        cluster = self._config.cluster
        if cluster.planner.actions is not PlannerMode.OFF:
            self._planner = Planning(
                cluster.planner,
                cluster.router.slo_classes,
                self.operator,
                membership=self._registry.membership,
                scrape=metrics.text,
            )
            self._planner.export_to(metrics.registry)

    async def take_over(self, takeover: Takeover) -> None:
        """Take over the workers; return when live workers are registered here and missing ones are starting."""
        left = await self._left.living()
        above = max((generation_of(worker.peer.incarnation) for worker in left), default=0)
        # A dead controller may have used a higher generation that live workers have seen; Ray's head knows of it too.
        self._incarnations.begin(await self._left.next_generation(above))
        orphans = await fitting(left, self._served)
        living = {name: description.assignment.role for name, (_, description) in orphans.items()}
        before, self._before = self._before, None
        if before is not None and before.slots and takeover == Takeover():
            takeover, state = before.takeover, restore(before, living)
        else:
            state = inherit(self._config.cluster, self._config.slots, living, takeover)
        await self._left.clear({slot.worker_id for slot in state.slots})
        self._assignments.inherit(state.topology, state.roles, state.drained)
        self.taken_over = frozenset(orphans)
        for slot in state.slots:
            self._fill(slot, orphans.get(slot.worker_id), drained=slot.worker_id in state.drained)
        await self._until_they_follow()
        self._registry.keep({PeerRef(one.name, one.incarnation) for _, one in self.fleet.health()})
        self.operator.resume(takeover)
        self._registry.look_again()
        self.adapters.inherit()
        self._tasks = [
            begin(going_on(self._assignments.run, _ASSIGNMENTS), _ASSIGNMENTS),
            begin(going_on(self.adapters.run, _ADAPTERS), _ADAPTERS),
            begin(self._adjust(orphans, state), "changing workers that were taken over"),
        ]
        if self._planner is not None:
            self._tasks.append(begin(self._planner.run(), "the planner"))

    @property
    def state(self) -> ControllerState:
        """The target state of the workers now."""
        slots = self.operator.staying(slot for slot, _ in self.fleet.health())
        topology = self._assignments.topology_with([slot.worker_id for slot in slots])
        return ControllerState(slots, topology, self.operator.takeover())

    async def release_workers(self) -> Takeover:
        """Stop supervising the workers, which keep serving, and return the state that the next controller needs.

        On return this controller makes no further calls to the workers. Running drains are completed first, pending
        waits are cancelled.
        """
        planning_and_more, self._tasks = self._tasks[1:], self._tasks[:1]
        await _cancel(planning_and_more)
        try:
            return await self.operator.finish()
        finally:
            await self._leave()

    async def mirror_membership(self, address: str) -> None:
        """Mirror the membership of the controller at `address`; see `mirror`."""
        await mirror(address, self._config.token, self._registry)

    async def stop(self, *, end_workers: bool) -> None:
        """End all workers and release their resources, or leave the workers running if `end_workers` is False."""
        if not end_workers:
            await self._leave()
            return
        await _cancel(self._tasks)
        await self.fleet.stop()
        await self._left.clear(())

    async def _leave(self) -> None:
        await _cancel(self._tasks)
        names = tuple(self.fleet.supervisors)
        await self.fleet.release()
        self._workers.release_all()
        self.taken_over = frozenset()
        if self._metrics is not None:
            for name in names:
                self._metrics.gone(name)

    def _fill(self, slot: Slot, orphan: tuple[OrphanedWorker, WorkerDescription] | None, *, drained: bool) -> None:
        if orphan is None:
            self.fleet.add(slot, drained=drained)
            return
        left, _ = orphan
        log.info("taking over %s (incarnation %d)", left.peer.worker_id, left.peer.incarnation)
        self.fleet.add(slot, (left.peer.incarnation, self._workers.adopt(slot, left)))

    async def _until_they_follow(self) -> None:
        """Wait until every taken-over worker is registered with this controller or turns out to be dead."""
        while any(  # noqa: ASYNC110
            one.phase is Phase.STARTING and one.name in self.taken_over and not one.restarts
            for _, one in self.fleet.health()
        ):
            await asyncio.sleep(LOOK_S)

    async def _adjust(self, orphans: Found, state: InitialWorkers) -> None:
        """Wait until the cluster serves, then adjust the number and settings of taken-over workers to the config."""
        await self.started.wait()
        cluster = self._config.cluster
        if state.surplus:
            sizes = SizeChange(workers=cluster.workers, grace_s=GRACE_S)
            if self._assignments.topology.mode is Mode.DISAGGREGATED:
                sizes = SizeChange(cluster.prefill, cluster.decode, grace_s=GRACE_S)
            await _log_on_failure(self.operator.resize(sizes), "there are more workers than requested")
        for name, (_, description) in orphans.items():
            changed = differences(tuning_of(self._asked_of(name)), description.tuning)
            if changed and name in self.fleet.supervisors:
                log.warning("%s was started with another %s; restarting it", name, ", ".join(changed))
                again = self.operator.drain_worker(name, GRACE_S, restart=True, force=False)
                await _log_on_failure(again, f"{name} keeps its settings")

    def _served(self, worker_id: str) -> Settings:
        return served_of(self._asked_of(worker_id))

    def _asked_of(self, worker_id: str) -> "WorkerConfig":
        """Return the config with which a worker of this name would start now, apart from its assignment."""
        slot = slot_of(self._config.cluster, self._config.slots, worker_id)
        return self._workers.config(slot, self._assignments.topology.assignment(slot.role))

    def _keeper(self, slot: Slot) -> ProcessSupervisor:
        return ProcessSupervisor(
            slot.worker_id,
            partial(self._spawn, slot),
            partial(self._forget, slot.worker_id),
            hang_deadline_s=self._config.cluster.hang_deadline_s,
            incarnations=self._incarnations,
        )

    def _new_slot(self, role: Role, slots: Sequence[Slot]) -> Slot:
        return another(self._config.cluster, role, slots, self._config.gpus)

    async def _spawn(self, slot: Slot, incarnation: int) -> Process:
        """Start a process with the currently wanted assignment, which may differ from that of the cluster's start."""
        return await self._workers.spawn(slot, self._assignments.wanted(slot.worker_id), incarnation)

    def _forget(self, worker_id: str, incarnation: int) -> None:
        """Unregister a dead worker, so that routers learn of its death as soon as its supervisor does."""
        self._registry.unregister(PeerRef(worker_id, incarnation))
        if self._metrics is not None:
            self._metrics.gone(worker_id)

    def _serves_metrics(self, slot: Slot, address: str) -> None:
        if self._metrics is not None:
            self._metrics.opened(slot.worker_id, slot.role, address)


async def _log_on_failure(change: Awaitable[object], as_it_is: str) -> None:
    try:
        await change
    except TandemError as error:
        log.warning("%s: %s", as_it_is, error.message)
    except Exception:
        log.exception("%s", as_it_is)


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
