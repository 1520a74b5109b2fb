"""Strategies: the layouts of a cluster of equal workers, and the simulated cluster of each."""

from dataclasses import dataclass
from pathlib import Path

from router.config import RouterConfig
from tandem.capacity.simulation.cluster import VirtualCluster
from tandem.capacity.simulation.hardware import Hardware
from tandem.capacity.simulation.network import Network
from tandem.capacity.simulation.spec import WorkerSpec
from tandem.engine.config import EngineConfig
from tandem.protocol.messages import Role
from tandem.protocol.mode import Mode
from tandem.protocol.policy_name import DEFAULT_STEP_POLICY, PolicyName
from tandem.settings.engine import GPU_BATCH_REQUESTS
from tandem.settings.model import ModelSettings
from tandem.settings.slo import DEFAULT_CLASSES, SloClass
from tandem.worker.config import WorkerConfig


@dataclass(frozen=True, slots=True)
class Strategy:
    """A cluster layout: `prefill` and `decode` workers, or `shared` workers that do both."""

    name: str
    mode: Mode
    prefill: int = 0
    decode: int = 0
    shared: int = 0
    step_policy: PolicyName = DEFAULT_STEP_POLICY
    step_budget: int | None = None

    @property
    def workers(self) -> int:
        """The number of all workers."""
        return self.prefill + self.decode + self.shared

    def cluster(
        self, machine: Hardware, network: Network, slo: SloClass, prefill: Hardware | None = None
    ) -> VirtualCluster:
        """Return a new simulated cluster; its router has the service class `slo` in addition to the default classes.

        `prefill` is the hardware of prefill workers; None = `machine`, as for all other workers.
        """
        machines = {Role.PREFILL: prefill or machine, Role.DECODE: machine, Role.BOTH: machine}
        roles = [Role.PREFILL] * self.prefill + [Role.DECODE] * self.decode + [Role.BOTH] * self.shared
        folder = Path(machine.name)
        specs = [
            WorkerSpec(
                WorkerConfig(
                    worker_id=f"{role.value}-{number}",
                    role=role,
                    engine=EngineConfig.of(
                        folder, max_batch_requests=GPU_BATCH_REQUESTS, max_step_tokens=machines[role].step_tokens
                    ),
                    step_policy=self.step_policy,
                    step_budget=self.step_budget,
                ),
                machines[role].device,
                machines[role].facts,
                machines[role].drafts,
            )
            for number, role in enumerate(roles)
        ]
        classes = {slo_class.name: slo_class for slo_class in (*DEFAULT_CLASSES, slo)}
        config = RouterConfig("router", ModelSettings(folder), "", mode=self.mode, slo_classes=tuple(classes.values()))
        return VirtualCluster(specs, config, network)


def strategies(workers: int, prefill: int, *, one_kind: bool = True) -> tuple[Strategy, ...]:
    """Return the strategies to compare for `workers` workers.

    Without `one_kind`, prefill and decode workers differ in hardware, so that no worker can do both. The disaggregated
    strategy, which needs at least two workers, has `prefill` prefill workers.
    """
    apart = Strategy(f"disaggregated {prefill}:{workers - prefill}", Mode.DISAGGREGATED, prefill, workers - prefill)
    if not one_kind:
        return (apart,)
    priority = PolicyName.DECODE_PRIORITY
    return (
        *((apart,) if workers > 1 else ()),
        Strategy("adaptive", Mode.ADAPTIVE, shared=workers, step_policy=priority),
        Strategy("colocated, decode-priority", Mode.COLOCATED, shared=workers, step_policy=priority),
        Strategy("colocated, unchunked", Mode.COLOCATED, shared=workers, step_policy=PolicyName.UNCHUNKED),
    )
