"""The workers' processes: Ray actors around `tandem.worker.actor.WorkerActor`, each in its own placement group."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tandem.cluster.ray_processes.orphaned_workers import (
    OrphanedWorker,
    is_made,
    is_removed,
    place_of,
    release_placement_group,
)
from tandem.cluster.ray_processes.ray_process import RayProcess, actor_class, in_group
from tandem.cluster.supervision.process_supervisor import Process
from tandem.cluster.supervision.roles import GPU, Slot, bundle
from tandem.net.security.credentials import metrics_key_of
from tandem.protocol.messages import Assignment
from tandem.settings.cluster import ClusterSettings
from tandem.settings.secrets import Secrets

if TYPE_CHECKING:
    from tandem.worker.config import WorkerConfig


_CPU_GATHER_S = 0.01
"""Seconds that an idle worker on a CPU waits for the rest of a burst of prompts.

A burst arrives within 10 ms, and a step takes longer. See docs/decisions/step_policy.md.
"""


_PLACE_LOOK_S = 0.25
"""Interval between checks of a placement group, in seconds; nodes take seconds to join."""


class WorkerActors:
    """Spawns workers, each in the placement group of its slot.

    A group holds the slot's resources between incarnations. Ray's autoscaler counts a group that is not placed yet as
    demand. The actors are detached, so that they outlive a controller that dies. Groups and actors end with `tandem
    up`, unless the config lets workers outlive it. A group that an earlier controller left is reused. Owned by
    `WorkerSupervisor`.
    """

    def __init__(
        self,
        config: ClusterSettings,
        token: str,
        on_metrics: Callable[[Slot, str], None] = lambda _slot, _address: None,
    ) -> None:
        """Create the spawner; `on_metrics` is called with the metrics address of each worker that has started."""
        self._cluster = config
        self._on_metrics = on_metrics
        self.controller_address = ""
        """The controller's listener, host:port; set before the first `spawn`."""
        self._token = token
        self._groups: dict[str, Any] = {}

    async def spawn(self, slot: Slot, assignment: Assignment, incarnation: int) -> Process:
        """Spawn a worker process in `slot`; the worker has `assignment` until the controller sends another one."""
        from tandem.worker.actor import WorkerActor

        options = {
            "name": f"{slot.worker_id}-{incarnation}",
            "num_cpus": 0,
            "resources": {name: count for name, count in bundle(slot).items() if name != GPU},
            "num_gpus": bundle(slot).get(GPU),
            "scheduling_strategy": in_group(await asyncio.to_thread(self._group, slot)),
            "lifetime": "detached",
        }
        settings = self.config(slot, assignment), incarnation, self._cluster.log_of(slot.worker_id)
        actor = actor_class(WorkerActor).options(**options).remote(*settings)
        return RayProcess(actor, partial(self._on_metrics, slot), partial(self._placed, slot))

    def adopt(self, slot: Slot, left: OrphanedWorker) -> Process:
        """Return a handle with which this controller supervises the live worker `left` of `slot`."""
        return left.process(self.controller_address, self._cluster.worker.outlive_s, partial(self._on_metrics, slot))

    def release_all(self) -> None:
        """Forget all placement groups without removing them, because another controller takes them over."""
        self._groups.clear()

    async def release(self, slot: Slot) -> None:
        """Release the slot's placement group; this ends the actor in it."""
        self._groups.pop(slot.worker_id, None)
        await asyncio.to_thread(release_placement_group, slot.worker_id)  # also a group that an earlier controller made

    async def _placed(self, slot: Slot) -> None:
        while not await asyncio.to_thread(lambda: is_made(self._group(slot))):  # noqa: ASYNC110
            await asyncio.sleep(_PLACE_LOOK_S)

    def _group(self, slot: Slot) -> Any:
        """Return the slot's placement group, and create it if there is none.

        Called in a worker thread and not on the event loop, because Ray's head may be slow.
        """
        from ray.util.placement_group import placement_group

        known = self._groups.get(slot.worker_id)
        if known is not None and not is_removed(known):
            return known
        group = place_of(slot.worker_id)
        if group is not None and group.bundle_specs != [bundle(slot)]:
            release_placement_group(slot.worker_id)
            group = None
        if group is None:
            lifetime = "detached" if self._cluster.worker.outlive_s else None
            group = placement_group([bundle(slot)], name=slot.worker_id, lifetime=lifetime)
        self._groups[slot.worker_id] = group
        return group

    def config(self, slot: Slot, assignment: Assignment) -> "WorkerConfig":
        """Return the config that a worker of `slot` starts with."""
        from tandem.engine.config import EngineConfig
        from tandem.protocol.speculation_method import SpeculationMethod
        from tandem.worker.config import WorkerConfig

        cluster = self._cluster
        settings = cluster.engine.with_fields(
            kv_cache_bytes=cluster.engine.kv_pool_bytes,
            device=slot.device,
            memory_fraction=slot.memory_fraction,
            tensor_parallel_size=cluster.tensor_ranks_of(slot.role),
            pipeline_parallel_size=cluster.stages_of(slot.role),
            context_parallel_size=cluster.context_ranks_of(slot.role),
            max_step_tokens=cluster.step_tokens_of(slot.role),
            max_batch_requests=cluster.engine.batch_requests,
            quantization=cluster.quantization_of(assignment.role),
            # With runtime adapters the controller makes workers load the adapters after their start
            # (`tandem/cluster/operations/adapters.py`).
            loras=() if cluster.engine.runtime_loras else cluster.engine.loras,
        )
        engine = EngineConfig(
            **settings.values(),
            # The router alone knows the model's other names.
            served=replace(cluster.served, served_model_names=(cluster.served.name,)),
            mtp=cluster.worker.speculate is SpeculationMethod.MTP,
            draft_graphs=cluster.worker.speculate not in {SpeculationMethod.AUTO, SpeculationMethod.OFF},
        )
        steps = {
            "step_policy": assignment.step_policy,
            "step_budget": assignment.step_budget,
            "itl_target_s": assignment.itl_target_s,
        }
        return WorkerConfig(
            **cluster.worker.values() | steps,
            worker_id=slot.worker_id,
            role=assignment.role,
            engine=engine,
            controller_address=self.controller_address,
            secrets=Secrets(
                self._token,
                cluster.secrets.metrics_key or (metrics_key_of(self._token) if cluster.router.guarded else ""),
            ),
            reports_tokens=bool(cluster.router.kv_events_endpoint),
            batch_wait_s=_CPU_GATHER_S if slot.device == "cpu" else 0.0,
        )
