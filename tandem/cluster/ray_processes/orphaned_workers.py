"""Orphaned workers: live workers and placement groups that earlier controllers of a cluster left behind."""

import asyncio
import logging
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from tandem.cluster.ray_processes.controllers import next_number
from tandem.cluster.ray_processes.ray_process import RayProcess
from tandem.cluster.supervision.process_supervisor import Process
from tandem.protocol.errors import TandemError
from tandem.protocol.messages import PeerRef, Role
from tandem.worker.reporting.description import Settings, WorkerDescription, differences

log = logging.getLogger(__name__)

ANSWER_S = 15.0
"""Timeout for a worker to describe itself, in seconds."""
GONE_S = 10.0
"""Timeout for Ray to forget a released placement group, in seconds."""
LOOK_S = 0.05
_NAME = re.compile(rf"(({'|'.join(Role)})-[0-9]+)-([0-9]+)")


class OrphanedWorker(ABC):
    """One incarnation of an orphaned worker. The controller that finds it supervises or ends it."""

    def __init__(self, peer: PeerRef) -> None:
        self.peer = peer

    @abstractmethod
    async def describe(self) -> WorkerDescription | None:
        """Return the worker's description; None if it does not respond in time."""

    @abstractmethod
    def process(self, controller_address: str, outlive_s: float, on_start: Callable[[str], None]) -> Process:
        """Return a handle with which the controller at `controller_address` supervises the worker.

        The handle's `start` makes the worker register with that controller; from then on the worker ends after
        `outlive_s` seconds without a controller. `on_start` is called with the worker's metrics address.
        """

    @abstractmethod
    async def end(self, *, keep_group: bool = False) -> None:
        """Kill the worker and, unless `keep_group` is set, release its placement group. Never raises."""


class OrphanedWorkers(ABC):
    """Finds the orphaned workers of a cluster and releases their resources."""

    @abstractmethod
    async def living(self) -> list[OrphanedWorker]:
        """Return all workers that have not ended, including those that start or drain."""

    @abstractmethod
    async def next_generation(self, above: int) -> int:
        """Return a new generation number, greater than `above` and than all earlier numbers.

        The number does not depend on any clock.
        """

    @abstractmethod
    async def clear(self, kept: Collection[str]) -> Collection[str]:
        """Release all placement groups except those of the workers in `kept`; return the names of the released ones."""


class RayOrphanedWorkers(OrphanedWorkers):
    """Finds the orphaned workers: detached actors and placement groups in this process's Ray namespace."""

    async def living(self) -> list[OrphanedWorker]:
        """Return all workers that have not ended."""
        return await asyncio.to_thread(_living)

    async def next_generation(self, above: int) -> int:
        """Return a generation number that Ray's head has not given out before, greater than `above`."""
        return await asyncio.to_thread(next_number, above)

    async def clear(self, kept: Collection[str]) -> Collection[str]:
        """Release all placement groups except those of the workers in `kept`; return the names of the released ones."""
        return await asyncio.to_thread(_clear, kept)


class _RayOrphanedWorker(OrphanedWorker):
    def __init__(self, peer: PeerRef, actor: Any, *, placed: bool) -> None:
        super().__init__(peer)
        self._actor = actor
        self._placed = placed

    async def describe(self) -> WorkerDescription | None:
        from ray.exceptions import RayError

        if not self._placed:
            return None
        try:
            async with asyncio.timeout(ANSWER_S):
                description: WorkerDescription = await self._actor.describe.remote()
        except (TimeoutError, RayError, AttributeError) as error:
            log.info("%s does not describe itself: %s", self.peer.worker_id, error)
            return None
        return description

    def process(self, controller_address: str, outlive_s: float, on_start: Callable[[str], None]) -> Process:
        start = partial(self._actor.change_controller.remote, controller_address, outlive_s)
        return RayProcess(self._actor, on_start, start=start)

    async def end(self, *, keep_group: bool = False) -> None:
        import ray

        ray.kill(self._actor, no_restart=True)
        if not keep_group:
            await asyncio.to_thread(release_placement_group, self.peer.worker_id)


async def fitting(
    workers: Sequence[OrphanedWorker], served: Callable[[str], Settings]
) -> dict[str, tuple[OrphanedWorker, WorkerDescription]]:
    """Return the workers that can be taken over, by id, and end the others.

    `served` returns the settings that the worker of this name must have. Of several incarnations of a worker, only the
    newest is kept.
    """
    descriptions = await asyncio.gather(*(worker.describe() for worker in workers))
    kept: dict[str, tuple[OrphanedWorker, WorkerDescription]] = {}
    unfit: list[OrphanedWorker] = []
    for worker, description in sorted(
        zip(workers, descriptions, strict=True), key=lambda pair: pair[0].peer.incarnation
    ):
        why = _unfit(description, served)
        if description is None or why:
            log.warning("%s cannot be taken over, %s; ending it", worker.peer.worker_id, why)
            unfit.append(worker)
            continue
        before = kept.pop(worker.peer.worker_id, None)
        unfit += [before[0]] if before else []
        kept[worker.peer.worker_id] = worker, description
    await asyncio.gather(*(worker.end(keep_group=worker.peer.worker_id in kept) for worker in unfit))
    return kept


def _unfit(description: WorkerDescription | None, served: Callable[[str], Settings]) -> str:
    """Return the reason why a worker cannot be taken over; "" = it can."""
    if description is None:
        return "it does not respond"
    if not description.serves:
        return "it does not serve"
    try:
        changed = differences(served(description.peer.worker_id), description.served)
    except TandemError as error:
        return error.message
    return f"it serves with another {', '.join(changed)}" if changed else ""


def _living() -> list[OrphanedWorker]:
    import ray

    workers: list[OrphanedWorker] = []
    for name in ray.util.list_named_actors():
        if (match := _NAME.fullmatch(name)) is None:
            continue
        peer = PeerRef(match[1], int(match[3]))
        try:
            workers.append(_RayOrphanedWorker(peer, ray.get_actor(name), placed=is_made(place_of(peer.worker_id))))
        except ValueError:
            log.info("%s ended in the meantime", name)
    return workers


def _clear(kept: Collection[str]) -> list[str]:
    from ray.util.placement_group import placement_group_table

    groups = placement_group_table().values()
    # The table has the groups of all namespaces, but the release looks a name up in this namespace only.
    names = {group["name"] for group in groups if group["state"] != "REMOVED"} - {"", *kept}
    return [name for name in names if release_placement_group(name)]


def release_placement_group(worker_id: str) -> bool:
    """Release a worker's placement group and thereby end its actors; return True if the group existed.

    Waits until the name is free again, or logs a warning if Ray takes longer than `GONE_S` seconds to forget it.
    """
    from ray.util.placement_group import remove_placement_group

    deadline_s, group = time.monotonic() + GONE_S, place_of(worker_id)
    while group is not None and place_of(worker_id) == group:
        if time.monotonic() > deadline_s:
            log.warning("Ray still has the placement group of %s, which was released %.0f s ago", worker_id, GONE_S)
            break
        remove_placement_group(group)
        time.sleep(LOOK_S)
    return group is not None


def is_removed(group: Any) -> bool:
    """Return True if this placement group has been released."""
    return _state(group) in {"REMOVED", None}


def is_made(group: Any) -> bool:
    """Return True if this placement group is placed on a node."""
    return group is not None and _state(group) == "CREATED"


def _state(group: Any) -> str | None:
    """Return the state of a placement group; None = Ray knows no such group."""
    from ray.util.placement_group import placement_group_table

    state: str | None = placement_group_table(group).get("state")
    return state


def place_of(worker_id: str) -> Any:
    """Return the placement group of this worker in this namespace; None = it has none."""
    from ray.util.placement_group import get_placement_group

    try:
        return get_placement_group(worker_id)
    except ValueError:
        return None
