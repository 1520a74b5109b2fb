"""Workers that no `tandem up` keeps any more, ended by somebody who says so before their time is over.

No router sends them anything, so they have nothing to finish. Whoever ends them counts as a controller meanwhile: none
that lives is overlooked, and one that begins waits until it is done.
"""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass

from cluster.joining import check_cluster_name, check_ray_address, namespace_of
from cluster.operations.handover_state import Handover
from cluster.ray_processes.controllers import Controllers, OtherController, RayControllers, actor_name, next_number
from cluster.ray_processes.joined_ray import JoinedRay
from cluster.ray_processes.orphaned_workers import OrphanedWorkers, RayOrphanedWorkers
from cluster.ray_processes.ray_process import actor_class, on_this_node, plainly
from wire.errors import FailedPrecondition, NotFound, Unavailable

ANSWER_S = 5.0
"""How long a controller may take to say where it is."""


@dataclass(frozen=True, slots=True)
class Cleared:
    """What there was and is no more, by name."""

    workers: tuple[str, ...]
    places: tuple[str, ...]
    """Of workers, some of which were dead or had not begun."""


class Clearing:
    """A controller that keeps nothing; `clear_ray` makes a Ray actor of it."""

    def __init__(
        self, number: int, controllers: Controllers | None = None, left: OrphanedWorkers | None = None
    ) -> None:
        self._number = number
        self._controllers = controllers or RayControllers()
        self._left = left or RayOrphanedWorkers()
        self._over = asyncio.Event()

    async def clear(self) -> Cleared:
        """End all workers and give their places back. FailedPrecondition if a controller lives that serves with them,
        NotFound if there are none.
        """
        try:
            if others := await self._controllers.others(self._number):
                raise FailedPrecondition(await _who_lives(others))
            workers = await self._left.living()
            await asyncio.gather(*(each.end(keep_place=True) for each in workers))
            places = await self._left.clear(())
        finally:
            self._over.set()
        if not workers and not places:
            raise NotFound("no workers were left there; --cluster-name says whose are meant")
        return Cleared(_sorted([each.peer.worker_id for each in workers]), _sorted(places))

    async def let_go(self) -> Handover:
        """For a younger controller, which finds no workers then."""
        await self._over.wait()
        return Handover()

    async def settled(self) -> str:
        """For an older one, which has to wait until this one is gone."""
        raise Unavailable("the workers are being ended")

    async def run(self) -> None:
        """Pending as long as the process lives."""
        await asyncio.Event().wait()


def clear_ray(address: str, name: str) -> Cleared:
    """See `Clearing.clear`, for the cluster of this name on the Ray at this address. InvalidArgument for what is no
    such, Unavailable if it cannot be joined.
    """
    check_ray_address(address)
    check_cluster_name(name)
    ray = JoinedRay(address, namespace=namespace_of(name))
    ray.start({}, processes=1)
    try:
        return asyncio.run(_clear())
    finally:
        ray.stop()


async def _clear() -> Cleared:
    from ray.exceptions import RayActorError

    number = next_number()
    options = {"name": actor_name(number), "num_cpus": 0, "scheduling_strategy": on_this_node()}
    actor = actor_class(Clearing).options(**options).remote(number)
    try:
        cleared: Cleared = await plainly(actor.clear.remote())
    except RayActorError as error:
        raise Unavailable(f"the process that ends the workers died: {error}; try again") from None
    return cleared


async def _who_lives(others: Collection[OtherController]) -> str:
    """In words that say what to do."""
    listeners = await asyncio.gather(*(_listener(each) for each in others))
    where = ", ".join(f"its controller is {listener}" for listener in listeners)
    return f"`tandem up` serves with these workers, {where}; stop it there, with Ctrl-C or `tandem down`"


async def _listener(controller: OtherController) -> str:
    try:
        async with asyncio.timeout(ANSWER_S):
            return f"at {await controller.settled()}"
    except TimeoutError:
        return "one that starts or hangs"
    except Unavailable:
        return "one that ends"


def _sorted(names: Collection[str]) -> tuple[str, ...]:
    return tuple(sorted(names))
