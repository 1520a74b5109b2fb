"""What earlier controllers of a cluster have left: workers that live, and places for them."""

import asyncio
import logging
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from cluster.ray_processes.controllers import next_number
from cluster.ray_processes.ray_process import RayProcess
from cluster.supervision.process_supervisor import Process
from wire.errors import TandemError
from wire.messages import PeerRef, Role
from worker.reporting.description import Settings, WorkerDescription, differences

log = logging.getLogger(__name__)

ANSWER_S = 15.0
"""How long a worker may take to say what it is."""
GONE_S = 10.0
"""How long Ray may take to forget a place that was given back."""
LOOK_S = 0.05
_NAME = re.compile(rf"(({'|'.join(Role)})-[0-9]+)-([0-9]+)")


class OrphanedWorker(ABC):
    """One run of a worker that nobody keeps. Whoever found it keeps or ends it."""

    def __init__(self, peer: PeerRef) -> None:
        self.peer = peer

    @abstractmethod
    async def describe(self) -> WorkerDescription | None:
        """What it is and does; None if it does not say so in time."""

    @abstractmethod
    def process(self, controller_address: str, outlive_s: float, on_start: Callable[[str], None]) -> Process:
        """It as a process, whose start is that it follows this controller, and outlives it for so long; `on_start`
        hears where its metrics are.
        """

    @abstractmethod
    async def end(self, *, keep_place: bool = False) -> None:
        """Kill it and give its place back, unless another run of the worker is there. Never raises."""


class OrphanedWorkers(ABC):
    """Finds them."""

    @abstractmethod
    async def living(self) -> list[OrphanedWorker]:
        """All that have not ended, also those that start or drain."""

    @abstractmethod
    async def next_generation(self, above: int) -> int:
        """Of whoever keeps them from now on: greater than `above` and than all before it. No clock has a part in it."""

    @abstractmethod
    async def clear(self, kept: Collection[str]) -> Collection[str]:
        """Give back all places but those of these workers; whose they were."""


class NoOrphanedWorkers(OrphanedWorkers):
    """Of a cluster whose workers end with it."""

    async def living(self) -> list[OrphanedWorker]:
        return []

    async def next_generation(self, above: int) -> int:
        return above + 1

    async def clear(self, kept: Collection[str]) -> Collection[str]:
        return ()


class RayOrphanedWorkers(OrphanedWorkers):
    """Detached actors and placement groups of this process's namespace."""

    async def living(self) -> list[OrphanedWorker]:
        return await asyncio.to_thread(_living)

    async def next_generation(self, above: int) -> int:
        return await asyncio.to_thread(next_number, above)

    async def clear(self, kept: Collection[str]) -> Collection[str]:
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
            log.info("%s does not say what it is: %s", self.peer.worker_id, error)
            return None
        return description

    def process(self, controller_address: str, outlive_s: float, on_start: Callable[[str], None]) -> Process:
        follow = partial(self._actor.follow.remote, controller_address, outlive_s)
        return RayProcess(self._actor, on_start, start=follow)

    async def end(self, *, keep_place: bool = False) -> None:
        import ray

        ray.kill(self._actor, no_restart=True)
        if not keep_place:
            await asyncio.to_thread(give_back, self.peer.worker_id)


async def fitting(
    found: Sequence[OrphanedWorker], served: Callable[[str], Settings]
) -> dict[str, tuple[OrphanedWorker, WorkerDescription]]:
    """Those that can be taken over, by worker; the others are ended. `served` is what a worker of this name has to
    serve.
    """
    descriptions = await asyncio.gather(*(each.describe() for each in found))
    kept: dict[str, tuple[OrphanedWorker, WorkerDescription]] = {}
    unfit: list[OrphanedWorker] = []
    for worker, description in sorted(zip(found, descriptions, strict=True), key=lambda pair: pair[0].peer.incarnation):
        why = _unfit(description, served)
        if description is None or why:
            log.warning("%s cannot be taken over, %s; it is ended", worker.peer.worker_id, why)
            unfit.append(worker)
            continue
        before = kept.pop(worker.peer.worker_id, None)
        unfit += [before[0]] if before else []
        kept[worker.peer.worker_id] = worker, description
    await asyncio.gather(*(each.end(keep_place=each.peer.worker_id in kept) for each in unfit))
    return kept


def _unfit(description: WorkerDescription | None, served: Callable[[str], Settings]) -> str:
    """Why it cannot be taken over; "" = it can."""
    if description is None:
        return "it does not answer"
    if not description.serves:
        return "it does not serve"
    try:
        other = differences(served(description.peer.worker_id), description.served)
    except TandemError as error:
        return error.message
    return f"it serves with another {', '.join(other)}" if other else ""


def _living() -> list[OrphanedWorker]:
    import ray

    found: list[OrphanedWorker] = []
    for name in ray.util.list_named_actors():
        if (match := _NAME.fullmatch(name)) is None:
            continue
        peer = PeerRef(match[1], int(match[3]))
        try:
            found.append(_RayOrphanedWorker(peer, ray.get_actor(name), placed=is_made(place_of(peer.worker_id))))
        except ValueError:
            log.info("%s went in the meantime", name)
    return found


def _clear(kept: Collection[str]) -> list[str]:
    from ray.util.placement_group import placement_group_table

    groups = placement_group_table().values()
    # Names are those of all namespaces.
    names = {group["name"] for group in groups if group["state"] != "REMOVED"} - {"", *kept}
    return [name for name in names if give_back(name)]


def give_back(worker_id: str) -> bool:
    """Returns when another place may have the name, or, with a warning, when Ray takes too long to forget it; whether
    there was one. What runs there ends.
    """
    from ray.util.placement_group import remove_placement_group

    give_up, group = time.monotonic() + GONE_S, place_of(worker_id)
    while group is not None and place_of(worker_id) == group:
        if time.monotonic() > give_up:
            log.warning("Ray still has the place of %s, which was given back %.0f s ago", worker_id, GONE_S)
            break
        remove_placement_group(group)
        time.sleep(LOOK_S)
    return group is not None


def is_removed(place: Any) -> bool:
    """Whether somebody has given this placement group back."""
    return _state(place) in {"REMOVED", None}


def is_made(place: Any) -> bool:
    """Whether this placement group has a node."""
    return place is not None and _state(place) == "CREATED"


def _state(place: Any) -> str | None:
    """None = Ray knows no such placement group."""
    from ray.util.placement_group import placement_group_table

    state: str | None = placement_group_table(place).get("state")
    return state


def place_of(worker_id: str) -> Any:
    """The placement group of this worker in this namespace; None = it has none."""
    from ray.util.placement_group import get_placement_group

    try:
        return get_placement_group(worker_id)
    except ValueError:
        return None
