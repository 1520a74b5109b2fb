"""The workers of a cluster as one controller keeps them: taken over or started, told their assignments, and let go again."""

import asyncio
import logging
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from cluster.background import begin, going_on
from cluster.config import ClusterConfig
from cluster.leadership.forwarding import mirror
from cluster.metrics import ClusterMetrics
from cluster.operations.assignments import Assignments
from cluster.operations.handover_state import Handover, HandoverState, inherit, slot_of
from cluster.operations.operator import Operator
from cluster.operations.worker_slots import Fleet
from cluster.planner_config import PlannerMode
from cluster.planning import Planning
from cluster.ray_processes.orphaned_workers import OrphanedWorker, OrphanedWorkers, fitting
from cluster.ray_processes.ray_process import node_is_up
from cluster.ray_processes.worker_actors import WorkerActors
from cluster.supervision.health import Phase
from cluster.supervision.incarnations import Incarnations, generation_of
from cluster.supervision.modes import Sharing
from cluster.supervision.process_supervisor import Process, ProcessSupervisor
from cluster.supervision.registry import Registry
from cluster.supervision.roles import Slot, another
from cluster.supervision.size import SizeChange
from cluster.supervision.worker_calls import WorkerCalls
from wire.errors import TandemError
from wire.messages import PeerRef, Role
from wire.mode import Mode
from worker.reporting.description import Settings, WorkerDescription, differences, served_of, tuning_of

if TYPE_CHECKING:
    from worker.config import WorkerConfig

log = logging.getLogger(__name__)

LOOK_S = 0.02
GRACE_S = 60.0
"""What workers that were taken over have for their requests, before they are started again or leave."""

_ASSIGNMENTS = "telling workers their assignments"
Found = Mapping[str, tuple[OrphanedWorker, WorkerDescription]]


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
    number: int = 0
    """Which controller of its cluster it is: the greater, the younger."""


class WorkerSupervisor:
    """Owns the workers from `take_over` until `let_go` or `stop`. Belongs to the event loop."""

    def __init__(self, config: ControllerConfig, registry: Registry, left: OrphanedWorkers) -> None:
        cluster = config.cluster
        self._config = config
        self._registry = registry
        self._left = left
        self._incarnations = Incarnations()
        self._workers = WorkerActors(cluster, config.token, self._serves_metrics)
        self.fleet = Fleet(self._keeper, self._new_slot, self._workers.release)
        calls = WorkerCalls(config.token)
        self._assignments = Assignments(registry, Sharing.of(cluster), {}, calls.set_assignment)
        self.operator = Operator(registry, self._assignments, self.fleet, calls, node_is_up)
        self.taken_over: frozenset[str] = frozenset()
        """Workers that others had started."""
        self.started = asyncio.Event()
        """Set once the cluster serves: then what was taken over may change."""
        self._metrics: ClusterMetrics | None = None
        self._planner: Planning | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def open(self, address: str, metrics: ClusterMetrics) -> None:
        """Before all else: where workers find the controller, and who hears of their metrics."""
        self._workers.controller_address = address
        self._metrics = metrics
        cluster = self._config.cluster
        if cluster.planner.mode is not PlannerMode.OFF:
            self._planner = Planning(
                cluster.planner,
                cluster.slo_classes,
                self.operator,
                membership=self._registry.membership,
                scrape=metrics.text,
            )
            self._planner.tell(metrics.board)

    async def take_over(self, handover: Handover) -> None:
        """Returns when those that live follow this controller; those that are missing are on their way then."""
        left = await self._left.living()
        above = max((generation_of(each.peer.incarnation) for each in left), default=0)
        # Those that live may remember others that were above them and are gone: the head knows of these, too.
        self._incarnations.begin(await self._left.next_generation(above))
        found = await fitting(left, self._served)
        living = {name: description.assignment.role for name, (_, description) in found.items()}
        estate = inherit(self._config.cluster, self._config.slots, living, handover)
        await self._left.clear({slot.worker_id for slot in estate.slots})
        self._assignments.inherit(estate.sharing, estate.roles, estate.away)
        self.taken_over = frozenset(found)
        for slot in estate.slots:
            self._fill(slot, found.get(slot.worker_id), away=slot.worker_id in estate.away)
        await self._until_they_follow()
        self._registry.keep({PeerRef(one.name, one.incarnation) for _, one in self.fleet.health()})
        self.operator.resume(handover)
        self._tasks = [
            begin(going_on(self._assignments.run, _ASSIGNMENTS), _ASSIGNMENTS),
            begin(self._adjust(found, estate), "changing workers that were taken over"),
        ]
        if self._planner is not None:
            self._tasks.append(begin(self._planner.run(), "the planner"))

    async def let_go(self) -> Handover:
        """Workers that serve live on; returns when nothing here touches them any more."""
        planning_and_more, self._tasks = self._tasks[1:], self._tasks[:1]
        await _cancel(planning_and_more)
        try:
            return await self.operator.let_go()
        finally:
            await self._leave()

    async def follow(self, address: str) -> None:
        """See `mirror`."""
        await mirror(address, self._config.token, self._registry)

    async def stop(self, *, end_workers: bool) -> None:
        """End all workers and give their places back, or let them live on as they are."""
        if not end_workers:
            await self._leave()
            return
        await _cancel(self._tasks)
        await self.fleet.stop()
        await self._left.clear(())

    async def _leave(self) -> None:
        await _cancel(self._tasks)
        names = tuple(self.fleet.keepers)
        await self.fleet.let_go()
        self._workers.let_go()
        self.taken_over = frozenset()
        if self._metrics is not None:
            for name in names:
                self._metrics.gone(name)

    def _fill(self, slot: Slot, found: tuple[OrphanedWorker, WorkerDescription] | None, *, away: bool) -> None:
        if found is None:
            self.fleet.add(slot, away=away)
            return
        left, _ = found
        log.info("taking over %s (incarnation %d)", left.peer.worker_id, left.peer.incarnation)
        self.fleet.add(slot, (left.peer.incarnation, self._workers.adopt(slot, left)))

    async def _until_they_follow(self) -> None:
        """Or turned out not to live."""
        while any(  # noqa: ASYNC110
            one.phase is Phase.STARTING and one.name in self.taken_over and not one.restarts
            for _, one in self.fleet.health()
        ):
            await asyncio.sleep(LOOK_S)

    async def _adjust(self, found: Found, estate: HandoverState) -> None:
        """Once the cluster serves, there are as many workers as the config says, with its settings."""
        await self.started.wait()
        cluster = self._config.cluster
        if estate.surplus:
            sizes = SizeChange(workers=cluster.workers, grace_s=GRACE_S)
            if self._assignments.sharing.mode is Mode.DISAGGREGATED:
                sizes = SizeChange(cluster.prefill, cluster.decode, grace_s=GRACE_S)
            await _else_it_stays(self.operator.resize(sizes), "there are more workers than asked for")
        for name, (_, description) in found.items():
            other = differences(tuning_of(self._asked_of(name)), description.tuning)
            if other and name in self.fleet.keepers:
                log.warning("%s was started with another %s, and is started again", name, ", ".join(other))
                again = self.operator.drain_worker(name, GRACE_S, restart=True, force=False)
                await _else_it_stays(again, f"{name} keeps its settings")

    def _served(self, worker_id: str) -> Settings:
        return served_of(self._asked_of(worker_id))

    def _asked_of(self, worker_id: str) -> "WorkerConfig":
        """What a worker of this name would be started with, but for its assignment."""
        slot = slot_of(self._config.cluster, self._config.slots, worker_id)
        return self._workers.config(slot, self._assignments.sharing.assignment(slot.role))

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
        """With the assignment that it is to have now, not with that of the cluster's start."""
        return await self._workers.spawn(slot, self._assignments.wanted(slot.worker_id), incarnation)

    def _forget(self, worker_id: str, incarnation: int) -> None:
        """Routers hear of a death as soon as its keeper does."""
        self._registry.unregister(PeerRef(worker_id, incarnation))
        if self._metrics is not None:
            self._metrics.gone(worker_id)

    def _serves_metrics(self, slot: Slot, address: str) -> None:
        if self._metrics is not None:
            self._metrics.opened(slot.worker_id, slot.role, address)


async def _else_it_stays(change: Awaitable[object], as_it_is: str) -> None:
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
