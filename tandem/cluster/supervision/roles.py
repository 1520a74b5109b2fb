"""The slots of a cluster: its workers by role, and the hardware resources that each worker requests.

Every worker is one Ray actor in its own placement group. The custom resources `prefill` and `decode` mark the nodes
that may run a role, so each role can run on its own hardware; a node offers one unit for each worker that it can run.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tandem.protocol.errors import FailedPrecondition
from tandem.protocol.messages import Role
from tandem.settings.cluster import WORKERS_MAX, ClusterSettings
from tandem.settings.engine import GPU_MEMORY_FRACTION

GPU = "GPU"
"""Ray's name of the GPU resource."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A slot of the cluster for one worker at a time; the slot's id outlives the processes that fill the slot."""

    worker_id: str
    role: Role
    device: str
    """`cpu`, `cuda:N`, or `cuda`: the GPU that Ray assigns. The first GPU of a worker of several ranks."""
    memory_fraction: float = GPU_MEMORY_FRACTION
    """Fraction of its GPU's memory that the worker may use; unused on `cpu`."""
    ranks: int = 1
    """Number of consecutive GPUs of the worker; on `cpu`, number of its processes."""

    @property
    def gpus(self) -> range:
        """The ordinals of the worker's GPUs of this host; empty if it has none, or if Ray assigns them."""
        first = self.device.partition(":")[2]
        return range(int(first), int(first) + self.ranks) if first else range(0)


def plan(config: ClusterSettings, gpus: int) -> tuple[Slot, ...]:
    """Return one slot for each worker of the config.

    On `cuda` the workers use the host's `gpus` GPUs round-robin; on a joined Ray, Ray assigns each worker the GPUs of
    its node.
    """
    roles = [(role, i) for role, count in config.worker_counts().items() for i in range(count)]
    device = config.engine.device
    devices = [device] * len(roles) if config.ray_address else _devices(config, [role for role, _ in roles], gpus)
    slots = [
        Slot(f"{role.value}-{i}", role, device, ranks=config.ranks_of(role))
        for (role, i), device in zip(roles, devices, strict=True)
    ]
    return tuple(replace(slot, memory_fraction=_memory_fraction(config, slot, slots)) for slot in slots)


def another(config: ClusterSettings, role: Role, slots: Sequence[Slot], gpus: int) -> Slot:
    """Return a new slot in addition to `slots`, with the lowest free number of its role.

    Raises FailedPrecondition if the worker needs a GPU of this host and no GPU has enough memory left.
    """
    taken = {slot.worker_id for slot in slots}
    worker_id = next(name for i in range(len(taken) + 1) if (name := f"{role.value}-{i}") not in taken)
    slot = Slot(worker_id, role, config.engine.device, ranks=config.ranks_of(role))
    if config.engine.on_cpu or config.ray_address:
        return slot
    slot = replace(slot, memory_fraction=config.engine.gpu_memory_fraction)
    used = Counter[int]()
    for other in slots:
        used.update(dict.fromkeys(other.gpus, other.memory_fraction))
    choices = [replace(slot, device=device) for device in _devices(config, [role] * max(1, gpus // slot.ranks), gpus)]
    best = min(choices, key=lambda choice: max(used[gpu] for gpu in choice.gpus))
    if max(used[gpu] for gpu in best.gpus) + best.memory_fraction > 1:
        raise FailedPrecondition(
            f"no GPU of this host has {best.memory_fraction:.0%} of its memory left for another worker; start the"
            " cluster with a smaller --memory-fraction, or on a Ray cluster of more hosts (--address)"
        )
    return best


def _memory_fraction(config: ClusterSettings, slot: Slot, slots: Sequence[Slot]) -> float:
    if config.engine.memory_fraction is not None:
        return config.engine.memory_fraction
    sharers = [sum(gpu in other.gpus for other in slots) for gpu in slot.gpus]
    return GPU_MEMORY_FRACTION / max(sharers, default=1)


def _devices(config: ClusterSettings, roles: Sequence[Role], gpus: int) -> list[str]:
    """Return the first GPU of each worker: GPUs are given out in order, and again from the first if none is left."""
    if config.engine.device != "cuda":
        return [config.engine.device] * len(roles)
    devices, first = [], 0
    for role in roles:
        ranks = config.ranks_of(role)
        first = 0 if first + ranks > gpus else first
        devices.append(f"cuda:{first}")
        first += ranks
    return devices


def bundle(slot: Slot) -> dict[str, float]:
    """Return the resources of a slot's placement group: one unit per role, and the GPUs that Ray has to assign."""
    return _role_resources(slot.role, 1) | ({GPU: float(slot.ranks)} if slot.device == "cuda" else {})


def offer(config: ClusterSettings) -> dict[str, float]:
    """Return the resources that an existing Ray cluster must have, over all nodes, to run every worker of `config`."""
    offered: Counter[str] = Counter()
    for role, count in config.worker_counts().items():
        offered.update(_role_resources(role, count))
    if config.ray_address and not config.engine.on_cpu:
        offered[GPU] = sum(count * config.ranks_of(role) for role, count in config.worker_counts().items())
    return dict(offered)


def capacity() -> dict[str, float]:
    """Return the resources that a private node offers: enough for every worker that the cluster may ever have."""
    return {role.value: 2.0 * WORKERS_MAX for role in (Role.PREFILL, Role.DECODE)}


def _role_resources(role: Role, count: int) -> dict[str, float]:
    played = ((Role.PREFILL, role.prefills), (Role.DECODE, role.decodes))
    return {phase.value: float(count) for phase, plays in played if plays}
