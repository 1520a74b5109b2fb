"""Leader election: the youngest of the running controllers leads and supervises the workers.

The youngest controller is the one that was started last. The other controllers follow it: they mirror its membership.

1. A new controller registers under its name and then looks for others, so of two controllers at least one sees the
   other.
2. It makes the previous leader release the workers, which keep serving.
3. It takes over the live workers and starts missing ones; from then on it leads.
4. The previous leader follows the new leader until the new leader ends. A controller that finds a younger controller at
   its own start follows the younger one as well.
5. When the followed controller ends and no younger controller is left, the follower takes over the workers.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Protocol

from tandem.cluster.background import begin, going_on
from tandem.cluster.ray_processes.controllers import Controllers, OtherController
from tandem.cluster.supervision.takeover import Takeover
from tandem.protocol.errors import Unavailable

log = logging.getLogger(__name__)

AGAIN_S = 1.0


class SupervisedWorkers(Protocol):
    """The operations on the workers that the leader election needs."""

    async def take_over(self, takeover: Takeover) -> None:
        """Supervise all live workers and start missing ones."""

    async def release_workers(self) -> Takeover:
        """Release all workers to another controller; workers that serve keep serving."""

    async def mirror_membership(self, address: str) -> None:
        """Mirror the membership of the controller at this address, until cancelled."""


class LeaderElection:
    """One controller's part in the election. Belongs to the controller's event loop."""

    def __init__(self, number: int, controllers: Controllers, workers: SupervisedWorkers) -> None:
        self._number = number
        self._controllers = controllers
        self._workers = workers
        self._one_at_a_time = asyncio.Lock()
        self._keeps = False
        self._started = asyncio.Event()
        self._stopped = False
        self._leader_task: asyncio.Task[None] | None = None
        self.successor = ""
        """The leader's listener, host:port; empty = this controller leads, or the leader is unknown."""
        self.kept_at = ""
        """The last known `successor`, kept while the leader is unknown; empty = this controller leads."""
        self._changed = asyncio.Event()

    @property
    def keeps(self) -> bool:
        """True if this controller supervises the workers."""
        return self._keeps

    async def begin(self) -> None:
        """Take over the workers or, if a younger controller runs, follow it; return when the leader is known."""
        if await self._younger_or_take_over(set()) is not None:
            self._started.set()  # no other controller has to wait for this one
            self._leader_task = asyncio.ensure_future(self._follow_leader())
            await self.decided()

    def started(self) -> None:
        """Mark this controller's start as complete: from now on another controller may take over the workers."""
        self._started.set()

    async def wait_until_decided(self) -> None:
        """Wait until this controller leads or knows a leader that has taken over the workers.

        Raises Unavailable if this controller stops.
        """
        await self.decided()
        self._check_not_stopped()

    async def release_workers(self) -> Takeover:
        """Release the workers to a younger controller, once this controller's own start is complete.

        Raises Unavailable if this controller stops or does not lead.
        """
        await self._started.wait()
        async with self._one_at_a_time:
            self._check_not_stopped()
            if not self._keeps:
                raise Unavailable("this controller does not supervise the workers")
            log.info("releasing all workers to a younger controller")
            self._keeps = False
            self._changed.clear()
            try:
                return await self._workers.release_workers()
            finally:
                self._leader_task = asyncio.ensure_future(self._follow_leader())

    async def decided(self) -> str:
        """Wait until the leader is known, and return `successor`."""
        while not self._keeps and not self.successor and not self._stopped:
            await self._changed.wait()
        return self.successor

    async def alone(self) -> bool:
        """Return True if no other controller runs."""
        return not await self._controllers.others(self._number)

    async def stop(self) -> None:
        """Leave the election and wake all waiters."""
        self._stopped = True
        self._changed.set()
        self._started.set()
        if self._leader_task is not None:
            self._leader_task.cancel()
            await asyncio.gather(self._leader_task, return_exceptions=True)

    async def _takeover(self) -> Takeover:
        """Make the older controller that leads release its workers, and return their state; empty if none leads."""
        older = [
            controller
            for controller in await self._controllers.others(self._number)
            if controller.number < self._number
        ]
        for controller in reversed(older):
            try:
                return await controller.release_workers()
            except Unavailable as error:
                log.info("%s", error.message)
        return Takeover()

    async def _younger_or_take_over(self, over: set[int]) -> OtherController | None:
        """Return the youngest of the younger controllers; if there is none, take over the workers and return None.

        Controllers with numbers in `over` have ended and are ignored. A controller that starts after this check sees
        this controller, asks it to release the workers, and waits until this controller has taken them over.
        """
        async with self._one_at_a_time:
            younger = await self._youngest(over)
            if younger is not None:
                return younger
            await self._workers.take_over(await self._takeover())
            self.successor = self.kept_at = ""
            self._keeps = True
        self._changed.set()
        return None

    async def _follow_leader(self) -> None:
        """Follow the leader until this controller leads again."""
        over: set[int] = set()
        while not self._keeps:
            try:
                await self._follow_youngest(over)
            except Exception:
                log.exception("following the leader failed; trying again")
                await asyncio.sleep(AGAIN_S)

    async def _follow_youngest(self, over: set[int]) -> None:
        """Follow the youngest of the younger controllers until it ends, then add its number to `over`.

        If there is no younger controller, take over the workers. Controllers with numbers in `over` have ended and are
        ignored.
        """
        successor = await self._younger_or_take_over(over)
        if successor is None:
            log.warning("no younger controller lives; this one has taken over")
            return
        async with self._following(successor):
            await successor.ended()
        over.add(successor.number)
        self.successor = ""
        self._changed.clear()

    @asynccontextmanager
    async def _following(self, successor: OtherController) -> AsyncIterator[None]:
        what = "following another controller"
        following = begin(going_on(partial(self._wait_for_successor, successor), what), what)
        try:
            yield
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    async def _wait_for_successor(self, successor: OtherController) -> None:
        try:
            self.successor = self.kept_at = await successor.wait_until_decided()
        except Unavailable as error:
            log.info("%s", error.message)
            return
        self._changed.set()
        log.info("the controller at %s supervises the workers", self.successor)
        await self._workers.mirror_membership(self.successor)

    async def _youngest(self, over: set[int]) -> OtherController | None:
        others = await self._controllers.others(self._number)
        younger = [
            controller for controller in others if controller.number > self._number and controller.number not in over
        ]
        return younger[-1] if younger else None

    def _check_not_stopped(self) -> None:
        if self._stopped:
            raise Unavailable("this controller stops")
