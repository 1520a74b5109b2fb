"""The other controllers of a cluster, one for each `tandem up` of its name that lives, by age.

Who is younger is Ray's head's to say: it gives each number to one alone.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from typing import Any, TypeVar

from cluster.operations.handover_state import Handover
from wire.errors import Unavailable
from worker.actor import CONTROLLER

Reply = TypeVar("Reply")


class OtherController(ABC):
    """One that is not this one. Every call is Unavailable once it is gone or stops."""

    def __init__(self, number: int) -> None:
        self.number = number
        """The greater, the younger."""

    @abstractmethod
    async def let_go(self) -> Handover:
        """Have it keep its workers no longer; waits until its own start is over."""

    @abstractmethod
    async def settled(self) -> str:
        """Wait until it keeps all workers that it could, or follows another that does; where its listener is, host:port."""

    @abstractmethod
    async def ended(self) -> None:
        """Wait until it is gone, for whatever reason. Never raises."""


class Controllers(ABC):
    """Finds them."""

    @abstractmethod
    async def others(self, than: int) -> list[OtherController]:
        """All that live but the one of that number, the oldest first."""


class NoControllers(Controllers):
    """Of a cluster whose workers end with it."""

    async def others(self, than: int) -> list[OtherController]:
        return []


class RayControllers(Controllers):
    """Named actors of this process's namespace."""

    async def others(self, than: int) -> list[OtherController]:
        numbers = [number for number in await asyncio.to_thread(_numbers) if number != than]
        found = (await asyncio.to_thread(_controller, number) for number in sorted(numbers))
        return [each async for each in found if each is not None]


class _RayController(OtherController):
    def __init__(self, number: int, actor: Any) -> None:
        super().__init__(number)
        self._actor = actor

    async def let_go(self) -> Handover:
        handover: Handover = await _answer(self._actor.let_go.remote())
        return handover

    async def settled(self) -> str:
        return str(await _answer(self._actor.settled.remote()))

    async def ended(self) -> None:
        from ray.exceptions import RayError

        try:
            await self._actor.run.remote()
        except RayError:
            return


def actor_name(number: int) -> str:
    """Of the controller of this number."""
    return f"{CONTROLLER}{number}"


def next_number(above: int = 0) -> int:
    """Of a new controller, or of a time in which one keeps the workers: greater than `above` and than all that were
    given out before it, and never given out again, as long as Ray's head lives. No clock has a part in it.
    """
    import ray
    from ray.experimental.internal_kv import _internal_kv_list, _internal_kv_put

    namespace = ray.get_runtime_context().namespace
    names = (key.decode() for key in _internal_kv_list(CONTROLLER, namespace=namespace))
    number = 1 + max(above, *(int(name[len(CONTROLLER) :]) for name in names), 0)
    while _internal_kv_put(actor_name(number), "given", overwrite=False, namespace=namespace):
        number += 1  # it was there: somebody else has this one
    return number


def _numbers() -> list[int]:
    import ray

    return [int(name[len(CONTROLLER) :]) for name in ray.util.list_named_actors() if name.startswith(CONTROLLER)]


def _controller(number: int) -> OtherController | None:
    import ray

    try:
        return _RayController(number, ray.get_actor(actor_name(number)))
    except ValueError:
        return None  # it went in the meantime


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
