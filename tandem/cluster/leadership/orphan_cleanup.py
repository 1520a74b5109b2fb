"""Stops orphaned workers, which no `tandem up` supervises, at an operator's request, before their timeout ends them.

No router sends requests to these workers, so they have no requests to finish. The process that stops them takes part in
the leader election as a controller, so it finds every live controller, and a controller that starts meanwhile waits
until the clean-up is complete.
"""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass

from tandem.cluster.ray_processes.controllers import (
    Controllers,
    OtherController,
    RayControllers,
    actor_name,
    next_number,
)
from tandem.cluster.ray_processes.joined_ray import JoinedRay
from tandem.cluster.ray_processes.orphaned_workers import OrphanedWorkers, RayOrphanedWorkers
from tandem.cluster.ray_processes.ray_process import actor_class, on_this_node, plainly
from tandem.cluster.supervision.takeover import Takeover
from tandem.protocol.errors import FailedPrecondition, NotFound, Unavailable
from tandem.settings.cluster import check_cluster_name, check_ray_address, namespace_of

ANSWER_S = 5.0
"""Timeout for a controller to report its listener, in seconds."""


@dataclass(frozen=True, slots=True)
class CleanupResult:
    """The workers that were stopped and the placement groups that were released, by name."""

    workers: tuple[str, ...]
    groups: tuple[str, ...]
    """The released placement groups, including those of workers that were dead or had not started."""


class Clearing:
    """A controller that supervises no workers and stops the orphaned ones; `clear_ray` runs it as a Ray actor."""

    def __init__(
        self, number: int, controllers: Controllers | None = None, left: OrphanedWorkers | None = None
    ) -> None:
        self._number = number
        self._controllers = controllers or RayControllers()
        self._left = left or RayOrphanedWorkers()
        self._over = asyncio.Event()

    async def clear(self) -> CleanupResult:
        """Stop all orphaned workers and release their resources.

        Raises FailedPrecondition if a live controller uses the workers, and NotFound if there are no orphaned workers.
        """
        try:
            if others := await self._controllers.others(self._number):
                raise FailedPrecondition(await _live_controllers(others))
            workers = await self._left.living()
            await asyncio.gather(*(worker.end(keep_group=True) for worker in workers))
            groups = await self._left.clear(())
        finally:
            self._over.set()
        if not workers and not groups:
            raise NotFound("no workers were left there; --cluster-name says whose are meant")
        return CleanupResult(_sorted([worker.peer.worker_id for worker in workers]), _sorted(groups))

    async def release_workers(self) -> Takeover:
        """Wait until all orphaned workers are stopped, and return an empty state to the younger controller."""
        await self._over.wait()
        return Takeover()

    async def wait_until_decided(self) -> str:
        """Raise Unavailable, so that an older controller waits until this one is gone instead of following it."""
        raise Unavailable("the workers are being ended")

    async def run(self) -> None:
        """Wait until the process ends."""
        await asyncio.Event().wait()


def clear_ray(address: str, name: str) -> CleanupResult:
    """Stop the orphaned workers of the cluster `name` in the Ray cluster at `address`; see `Clearing.clear`.

    Raises InvalidArgument for an invalid address or name, and Unavailable if this process cannot join Ray.
    """
    check_ray_address("--address", address)
    check_cluster_name("--cluster-name", name)
    ray = JoinedRay(address, namespace=namespace_of(name))
    ray.start({}, processes=1)
    try:
        return asyncio.run(_clear())
    finally:
        ray.stop()


async def _clear() -> CleanupResult:
    from ray.exceptions import RayActorError

    number = next_number()
    options = {"name": actor_name(number), "num_cpus": 0, "scheduling_strategy": on_this_node()}
    actor = actor_class(Clearing).options(**options).remote(number)
    try:
        cleared: CleanupResult = await plainly(actor.clear.remote())
    except RayActorError as error:
        raise Unavailable(f"the process that ends the workers died: {error}; try again") from None
    return cleared


async def _live_controllers(others: Collection[OtherController]) -> str:
    """Return a sentence with the listeners of live controllers and how to stop them."""
    listeners = await asyncio.gather(*(_listener(controller) for controller in others))
    where = ", ".join(f"its controller is {listener}" for listener in listeners)
    return f"`tandem up` serves with these workers, {where}; stop it there, with Ctrl-C or `tandem down`"


async def _listener(controller: OtherController) -> str:
    try:
        async with asyncio.timeout(ANSWER_S):
            return f"at {await controller.wait_until_decided()}"
    except TimeoutError:
        return "one that starts or hangs"
    except Unavailable:
        return "one that ends"


def _sorted(names: Collection[str]) -> tuple[str, ...]:
    return tuple(sorted(names))
