"""The slots of a cluster: its workers by role, and the hardware resources that each worker requests.

Every worker is one Ray actor in its own placement group. The custom resources `prefill` and `decode` mark the nodes
that may run a role, so each role can run on its own hardware; a node offers one unit for each worker that it can run.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.protocol.errors import FailedPrecondition
from tandem.protocol.messages import Role
from tandem.protocol.mode import Mode
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


def plan(config: ClusterSettings, gpus: int) -> tuple[Slot, ...]:
    """Return one slot for each worker of the config.

    On `cuda` the workers use the host's `gpus` GPUs round-robin; on a joined Ray, Ray assigns each worker the GPUs of
    its node.
    """
    ranks = config.engine.tensor_parallel_size
    roles = [(role, i) for role, count in _counts(config).items() for i in range(count)]
    wanted = config.engine.device
    devices = [
        wanted if config.ray_address else _device(wanted, number, gpus // ranks, ranks) for number in range(len(roles))
    ]
    return tuple(
        Slot(f"{role.value}-{i}", role, device, _memory_fraction(config, devices.count(device)), ranks)
        for (role, i), device in zip(roles, devices, strict=True)
    )


def another(config: ClusterSettings, role: Role, slots: Sequence[Slot], gpus: int) -> Slot:
    """Return a new slot in addition to `slots`, with the lowest free number of its role.

    Raises FailedPrecondition if the worker needs a GPU of this host and no GPU has enough memory left.
    """
    ranks, taken = config.engine.tensor_parallel_size, {slot.worker_id for slot in slots}
    worker_id = next(name for i in range(len(taken) + 1) if (name := f"{role.value}-{i}") not in taken)
    if config.engine.on_cpu or config.ray_address:
        return Slot(worker_id, role, config.engine.device, ranks=ranks)
    fraction = config.engine.gpu_memory_fraction
    asked = config.engine.device
    devices = [_device(asked, number, gpus // ranks, ranks) for number in range(max(1, gpus // ranks))]
    used = {device: sum(slot.memory_fraction for slot in slots if slot.device == device) for device in devices}
    device = min(devices, key=lambda candidate: used[candidate])
    if used[device] + fraction > 1:
        raise FailedPrecondition(
            f"no GPU of this host has {fraction:.0%} of its memory left for another worker; start the cluster with a "
            "smaller --memory-fraction, or on a Ray cluster of more hosts (--address)"
        )
    return Slot(worker_id, role, device, fraction, ranks)


def _counts(config: ClusterSettings) -> dict[Role, int]:
    if config.router.mode == Mode.DISAGGREGATED:
        return {Role.PREFILL: config.prefill, Role.DECODE: config.decode}
    return {Role.BOTH: config.workers}


def _memory_fraction(config: ClusterSettings, sharers: int) -> float:
    if config.engine.memory_fraction is not None:
        return config.engine.memory_fraction
    return GPU_MEMORY_FRACTION if config.engine.on_cpu or config.ray_address else GPU_MEMORY_FRACTION / sharers


def _device(asked: str, number: int, places: int, ranks: int) -> str:
    """Return the first GPU of a worker, if the GPUs of the host have `places` for workers with `ranks` GPUs each."""
    if asked != "cuda":
        return asked
    return f"cuda:{number % max(places, 1) * ranks}"


def bundle(slot: Slot) -> dict[str, float]:
    """Return the resources of a slot's placement group: one unit per role, and the GPUs that Ray has to assign."""
    return _role_resources(slot.role, 1) | ({GPU: float(slot.ranks)} if slot.device == "cuda" else {})


def offer(config: ClusterSettings) -> dict[str, float]:
    """Return the resources that an existing Ray cluster must have, over all nodes, to run every worker of `config`."""
    offered: Counter[str] = Counter()
    for role, count in _counts(config).items():
        offered.update(_role_resources(role, count))
    if config.ray_address and not config.engine.on_cpu:
        offered[GPU] = config.worker_count * config.engine.tensor_parallel_size
    return dict(offered)


def capacity() -> dict[str, float]:
    """Return the resources that a private node offers: enough for every worker that the cluster may ever have."""
    return {role.value: 2.0 * WORKERS_MAX for role in (Role.PREFILL, Role.DECODE)}


def _role_resources(role: Role, count: int) -> dict[str, float]:
    played = ((Role.PREFILL, role.prefills), (Role.DECODE, role.decodes))
    return {phase.value: float(count) for phase, plays in played if plays}
