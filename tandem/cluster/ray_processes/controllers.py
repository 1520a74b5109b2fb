"""The other controllers of a cluster, one for each live `tandem up` with the cluster's name, ordered by age.

Ray's head gives each controller a new, greater number, so the controller with the higher number is the younger one.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from typing import Any, TypeVar

from tandem.cluster.supervision.takeover import Takeover
from tandem.protocol.errors import Unavailable
from tandem.worker.actor import CONTROLLER

Reply = TypeVar("Reply")


class OtherController(ABC):
    """Another controller. Every call raises Unavailable once that controller is gone or stops."""

    def __init__(self, number: int) -> None:
        self.number = number
        """The controller's number; a higher number means a younger controller."""

    @abstractmethod
    async def release_workers(self) -> Takeover:
        """Make the other controller release its workers, once its own start is complete."""

    @abstractmethod
    async def wait_until_decided(self) -> str:
        """Wait until the other controller leads or knows a leader that has taken over the workers.

        Returns the other controller's listener, host:port.
        """

    @abstractmethod
    async def ended(self) -> None:
        """Wait until the other controller is gone, for any reason. Never raises."""


class Controllers(ABC):
    """Lists the other live controllers of a cluster."""

    @abstractmethod
    async def others(self, than: int) -> list[OtherController]:
        """Return all live controllers except the controller with the number `than`, the oldest first."""


class NoControllers(Controllers):
    """Implements `Controllers` for a cluster whose workers end with its controller: it has no other controller."""

    async def others(self, than: int) -> list[OtherController]:
        """Return no controllers."""
        return []


class RayControllers(Controllers):
    """Lists the other live controllers: the named Ray actors of controllers in this process's namespace."""

    async def others(self, than: int) -> list[OtherController]:
        """Return the other live controllers, the oldest first."""
        numbers = [number for number in await asyncio.to_thread(_numbers) if number != than]
        controllers = (await asyncio.to_thread(_controller, number) for number in sorted(numbers))
        return [controller async for controller in controllers if controller is not None]


class _RayController(OtherController):
    def __init__(self, number: int, actor: Any) -> None:
        super().__init__(number)
        self._actor = actor

    async def release_workers(self) -> Takeover:
        takeover: Takeover = await _answer(self._actor.release_workers.remote())
        return takeover

    async def wait_until_decided(self) -> str:
        return str(await _answer(self._actor.wait_until_decided.remote()))

    async def ended(self) -> None:
        from ray.exceptions import RayError

        try:
            await self._actor.run.remote()
        except RayError:
            return


def actor_name(number: int) -> str:
    """Return the actor name of the controller of this number."""
    return f"{CONTROLLER}{number}"


def next_number(above: int = 0) -> int:
    """Return a new number for a controller or a generation, greater than `above` and than all numbers returned before.

    Ray's head stores the numbers and never gives out one again while it lives. The number does not depend on any clock.
    """
    import ray
    from ray.experimental.internal_kv import _internal_kv_list, _internal_kv_put

    namespace = ray.get_runtime_context().namespace
    names = (key.decode() for key in _internal_kv_list(CONTROLLER, namespace=namespace))
    number = 1 + max(above, *(int(name[len(CONTROLLER) :]) for name in names), 0)
    while _internal_kv_put(actor_name(number), "given", overwrite=False, namespace=namespace):
        number += 1  # another controller has taken this one
    return number


def _numbers() -> list[int]:
    import ray

    return [int(name[len(CONTROLLER) :]) for name in ray.util.list_named_actors() if name.startswith(CONTROLLER)]


def _controller(number: int) -> OtherController | None:
    import ray

    try:
        return _RayController(number, ray.get_actor(actor_name(number)))
    except ValueError:
        return None  # it ended in the meantime


async def _answer(reply: Awaitable[Reply]) -> Reply:
    from ray.exceptions import RayError, RayTaskError

    try:
        return await reply
    except RayTaskError as error:
        if isinstance(error.cause, Unavailable):
            raise error.cause from None
        raise Unavailable(f"another controller of this cluster failed: {error.cause}") from None
    except RayError as error:
        raise Unavailable(f"another controller of this cluster is gone: {error}") from None
