"""Workers' processes: Ray actors around `worker.actor.WorkerActor`, each in a placement group of its own."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from cluster.config import ClusterConfig
from cluster.ray_processes.orphaned_workers import OrphanedWorker, give_back, is_made, is_removed, place_of
from cluster.ray_processes.ray_process import RayProcess, actor_class
from cluster.supervision.process_supervisor import Process
from cluster.supervision.roles import GPU, Slot, bundle
from wire.messages import Assignment
from wire.security.credentials import metrics_key_of

if TYPE_CHECKING:
    from worker.config import WorkerConfig


_CPU_GATHER_S = 0.01
"""A burst reaches a worker within some 10 ms; a step on CPUs takes longer (docs/decisions/0005)."""


_PLACE_LOOK_S = 0.25
"""How often to ask whether a place has been found; nodes take seconds to come."""


class WorkerActors:
    """Spawns workers. A slot's placement group is made once and holds its place between two incarnations.

    A group that finds no place is what Ray's autoscaler takes for demand. Where workers may outlive this process, both
    are detached, and a place that an earlier one left is used again.
    """

    def __init__(
        self,
        config: ClusterConfig,
        token: str,
        on_metrics: Callable[[Slot, str], None] = lambda _slot, _address: None,
    ) -> None:
        """`on_metrics` hears where each one that has started serves its metrics."""
        self._cluster = config
        self._on_metrics = on_metrics
        self.controller_address = ""
        """Set before the first `spawn`."""
        self._token = token
        self._groups: dict[str, Any] = {}

    async def spawn(self, slot: Slot, assignment: Assignment, incarnation: int) -> Process:
        """A new process for `slot`, which does `assignment` until it is told otherwise."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from worker.actor import WorkerActor

        options = {
            "name": f"{slot.worker_id}-{incarnation}",
            "num_cpus": 0,
            "resources": {name: count for name, count in bundle(slot).items() if name != GPU},
            "num_gpus": bundle(slot).get(GPU),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(await asyncio.to_thread(self._group, slot)),
        }
        if self._cluster.workers_outlive_s:
            options["lifetime"] = "detached"
        settings = self.config(slot, assignment), incarnation, self._cluster.log_of(slot.worker_id)
        actor = actor_class(WorkerActor).options(**options).remote(*settings)
        return RayProcess(actor, partial(self._on_metrics, slot), partial(self._placed, slot))

    def adopt(self, slot: Slot, left: OrphanedWorker) -> Process:
        """One that lives in `slot` already, as a process of this controller."""
        return left.process(self.controller_address, self._cluster.workers_outlive_s, partial(self._on_metrics, slot))

    def let_go(self) -> None:
        """All places belong to another controller from now on."""
        self._groups.clear()

    async def release(self, slot: Slot) -> None:
        """Give its place back; what still runs there ends."""
        from ray.util.placement_group import remove_placement_group

        group = self._groups.pop(slot.worker_id, None)
        if self._cluster.workers_outlive_s:
            await asyncio.to_thread(give_back, slot.worker_id)  # whoever made it
        elif group is not None:
            await asyncio.to_thread(remove_placement_group, group)

    async def _placed(self, slot: Slot) -> None:
        while not await asyncio.to_thread(lambda: is_made(self._group(slot))):  # noqa: ASYNC110
            await asyncio.sleep(_PLACE_LOOK_S)

    def _group(self, slot: Slot) -> Any:
        """Beside the event loop: Ray's head answers when it can."""
        from ray.util.placement_group import placement_group

        known = self._groups.get(slot.worker_id)
        if known is not None and not (self._cluster.workers_outlive_s and is_removed(known)):
            return known
        group = place_of(slot.worker_id) if self._cluster.workers_outlive_s else None
        if group is not None and group.bundle_specs != [bundle(slot)]:
            give_back(slot.worker_id)
            group = None
        if group is None:
            lifetime = "detached" if self._cluster.workers_outlive_s else None
            group = placement_group([bundle(slot)], name=slot.worker_id, lifetime=lifetime)
        self._groups[slot.worker_id] = group
        return group

    def config(self, slot: Slot, assignment: Assignment) -> "WorkerConfig":
        """What a worker of `slot` is started with."""
        from engine.config import EngineConfig
        from worker.config import WorkerConfig

        cluster = self._cluster
        engine = EngineConfig(
            model=cluster.model,
            device=slot.device,
            dtype=cluster.dtype,
            page_tokens=cluster.page_tokens,
            kv_cache_bytes=cluster.worker_kv_cache_bytes,
            memory_fraction=slot.memory_fraction,
            max_step_tokens=cluster.max_step_tokens,
            max_batch_requests=cluster.batch_requests,
            random_weights=cluster.random_weights,
            threads=cluster.threads,
        )
        return WorkerConfig(
            worker_id=slot.worker_id,
            role=assignment.role,
            engine=engine,
            model_name=cluster.model_name or cluster.model.name,
            controller_address=self.controller_address,
            token=self._token,
            metrics_key=cluster.metrics_key or (metrics_key_of(self._token) if cluster.api_keys else ""),
            step_deadline_s=cluster.step_deadline_s,
            prefix_cache=cluster.prefix_cache,
            kv_checksum_rate=cluster.kv_checksum_rate,
            trusted_network=cluster.trusted_network,
            lease_s=cluster.kv_lease_s,
            transfer_deadline_s=cluster.kv_transfer_deadline_s,
            quarantine_share_max=cluster.kv_quarantine_share,
            step_policy=assignment.step_policy,
            step_budget=assignment.step_budget,
            itl_target_s=assignment.itl_target_s,
            ceilings=cluster.ceilings,
            outlive_s=cluster.workers_outlive_s,
            gather_s=_CPU_GATHER_S if slot.device == "cpu" else 0.0,
        )
