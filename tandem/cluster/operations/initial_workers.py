"""The initial workers of a controller that takes over from another one: the live workers and the missing ones."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tandem.cluster.supervision.modes import Topology
from tandem.cluster.supervision.roles import Slot
from tandem.cluster.supervision.takeover import ControllerState, Takeover
from tandem.protocol.messages import Role
from tandem.protocol.mode import Mode
from tandem.settings.cluster import ClusterSettings
from tandem.settings.planner import PlannerMode


@dataclass(frozen=True, slots=True)
class InitialWorkers:
    """The workers that a controller has at first."""

    slots: tuple[Slot, ...]
    topology: Topology
    roles: Mapping[str, Role]
    """The current or initial role of each worker; `Assignments` changes roles where `topology` requires it."""
    drained: tuple[str, ...] = ()
    """Workers that are not started at first, because they were drained."""
    surplus: bool = False
    """True if there are more workers than the config wants."""


def inherit(
    config: ClusterSettings, planned: Sequence[Slot], living: Mapping[str, Role], takeover: Takeover | None = None
) -> InitialWorkers:
    """Return the initial workers from `planned`, the config's slots, and `living`, the live workers with their roles.

    The config determines the number of workers. If the planner may change it and there are live workers, the number is
    instead that of the live workers, within the planner's limits. Drained workers count as well and are not replaced,
    because an operator wanted fewer workers to serve.
    """
    takeover = takeover or Takeover()
    drained = _absent(takeover, living)
    there = [*living, *drained]
    asked = _asked(config, len(living))
    new = _missing(planned, there, asked - len(there))
    slots = (*(slot_of(config, planned, name) for name in there), *new)
    roles = {slot.worker_id: living.get(slot.worker_id, slot.role) for slot in slots}
    surplus = bool(living) and len(slots) > asked
    return InitialWorkers(slots, _topology(config, roles, living), roles, drained, surplus)


def restore(before: ControllerState, living: Mapping[str, Role]) -> InitialWorkers:
    """Return the initial workers of a controller that replaces a dead one, from the dead controller's state."""
    drained = _absent(before.takeover, living)
    roles = {slot.worker_id: living.get(slot.worker_id, slot.role) for slot in before.slots}
    return InitialWorkers(before.slots, before.topology, roles, drained)


def _absent(takeover: Takeover, living: Collection[str]) -> tuple[str, ...]:
    return tuple(name for name in (*takeover.drained, *dict(takeover.rescheduling)) if name not in living)


def _asked(config: ClusterSettings, living: int) -> int:
    """Return the target number of workers, given the number of live ones."""
    limits = config.planner.limits.workers
    if not living or config.planner.actions is not PlannerMode.ON or limits is None:
        return config.worker_count
    return limits.clip(living)


def _missing(planned: Sequence[Slot], there: Iterable[str], count: int) -> tuple[Slot, ...]:
    """Return up to `count` free slots, beginning with slots of roles that have too few workers."""
    have = Counter(_role_of(name) for name in there)
    free = [slot for slot in planned if slot.worker_id not in set(there)]
    lacking: list[Slot] = []
    for slot in planned:
        if have[slot.role] > 0:
            have[slot.role] -= 1
        else:
            lacking += [candidate for candidate in free if candidate.role is slot.role and candidate not in lacking][:1]
    ranked = [*lacking, *(slot for slot in free if slot not in lacking)]
    return tuple(ranked[: max(count, 0)])


def _topology(config: ClusterSettings, roles: Mapping[str, Role], living: Mapping[str, Role]) -> Topology:
    topology = Topology.of(config)
    if topology.mode is not Mode.DISAGGREGATED:
        return topology
    prefill = topology.prefill
    if living and config.planner.actions is PlannerMode.ON:
        prefill = sum(role is Role.PREFILL for role in roles.values())
    return replace(topology, prefill=min(max(prefill, 1), len(roles) - 1))


def slot_of(config: ClusterSettings, planned: Sequence[Slot], worker_id: str) -> Slot:
    """Return the slot of the worker of this name.

    A worker that the config does not contain gets a GPU slot: such workers exist only in joined Ray clusters, where
    every worker has a GPU.
    """
    known = {slot.worker_id: slot for slot in planned}
    return known.get(worker_id) or Slot(
        worker_id, _role_of(worker_id), config.engine.device, config.engine.gpu_memory_fraction
    )


def _role_of(worker_id: str) -> Role:
    """Return the role that a worker's slot is named after, whatever the worker's current role is."""
    return Role(worker_id.rpartition("-")[0])
