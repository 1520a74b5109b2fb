"""Which workers a controller has that begins where others have been: those that live, and those that are missing."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from cluster.config import GPU_MEMORY_FRACTION, ClusterConfig
from cluster.planner_config import PlannerMode
from cluster.supervision.modes import Sharing
from cluster.supervision.roles import Slot
from wire.messages import Role
from wire.mode import Mode


@dataclass(frozen=True, slots=True)
class Handover:
    """What a controller that lets its workers go knows beside what they say themselves."""

    away: tuple[str, ...] = ()
    """Who has drained, and stays away until somebody wants it back."""
    moving: tuple[tuple[str, str], ...] = ()
    """Who starts elsewhere once its node has left, and that node's address."""


@dataclass(frozen=True, slots=True)
class HandoverState:
    """The workers to begin with."""

    slots: tuple[Slot, ...]
    sharing: Sharing
    roles: Mapping[str, Role]
    """Of each, as it is now or starts; `Assignments` makes of them what `sharing` needs."""
    away: tuple[str, ...] = ()
    """Those that are not to be started for now."""
    surplus: bool = False
    """Whether there are more than the config asks for."""


def inherit(
    config: ClusterConfig, planned: Sequence[Slot], living: Mapping[str, Role], handover: Handover | None = None
) -> HandoverState:
    """`planned` are the slots of the config, `living` the workers that live, with their roles.

    The config says how many there are to be, unless the planner does: then all stay that live. Those who are away
    count, since somebody wanted fewer to serve.
    """
    handover = handover or Handover()
    away = tuple(name for name in (*handover.away, *dict(handover.moving)) if name not in living)
    there = [*living, *away]
    asked = _asked(config, len(living))
    new = _missing(planned, there, asked - len(there))
    slots = (*(slot_of(config, planned, name) for name in there), *new)
    roles = {slot.worker_id: living.get(slot.worker_id, slot.role) for slot in slots}
    surplus = bool(living) and len(slots) > asked
    return HandoverState(slots, _sharing(config, roles, living), roles, away, surplus)


def _asked(config: ClusterConfig, living: int) -> int:
    """How many workers there are to be."""
    limits = config.planner.limits.workers
    if not living or config.planner.mode is not PlannerMode.ON or limits is None:
        return config.worker_count
    return limits.clip(living)


def _missing(planned: Sequence[Slot], there: Iterable[str], count: int) -> tuple[Slot, ...]:
    """So many slots that nobody has; first those of roles that too few have a place for."""
    have = Counter(_role_of(name) for name in there)
    free = [slot for slot in planned if slot.worker_id not in set(there)]
    lacking: list[Slot] = []
    for slot in planned:
        if have[slot.role] > 0:
            have[slot.role] -= 1
        else:
            lacking += [each for each in free if each.role is slot.role and each not in lacking][:1]
    ranked = [*lacking, *(slot for slot in free if slot not in lacking)]
    return tuple(ranked[: max(count, 0)])


def _sharing(config: ClusterConfig, roles: Mapping[str, Role], living: Mapping[str, Role]) -> Sharing:
    sharing = Sharing.of(config)
    if sharing.mode is not Mode.DISAGGREGATED:
        return sharing
    prefill = sharing.prefill
    if living and config.planner.mode is PlannerMode.ON:
        prefill = sum(role is Role.PREFILL for role in roles.values())
    return replace(sharing, prefill=min(max(prefill, 1), len(roles) - 1))


def slot_of(config: ClusterConfig, planned: Sequence[Slot], worker_id: str) -> Slot:
    """Of a worker of this name. The config may not ask for it: only joined Rays have such, whose workers have a GPU
    each.
    """
    known = {slot.worker_id: slot for slot in planned}
    return known.get(worker_id) or Slot(
        worker_id, _role_of(worker_id), config.device, config.memory_fraction or GPU_MEMORY_FRACTION
    )


def _role_of(worker_id: str) -> Role:
    """That a worker has a place for, whatever it does now."""
    return Role(worker_id.rpartition("-")[0])
