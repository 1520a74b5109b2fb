"""Who keeps the workers where several controllers live: the youngest. The others say what it says.

1. a new controller can be found by its name, and then looks for others; of two, one at least sees the other
2. it has the one before it let go: that one ends nothing that serves
3. it takes over what lives, and fills what is missing: it is settled
4. whoever let go follows it, until it ends; so does who finds a younger one when it begins
5. if nobody younger lives then, the one that followed takes over
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Protocol

from cluster.background import begin, going_on
from cluster.operations.handover_state import Handover
from cluster.ray_processes.controllers import Controllers, OtherController
from wire.errors import Unavailable

log = logging.getLogger(__name__)

AGAIN_S = 1.0


class SupervisedWorkers(Protocol):
    """What is kept."""

    async def take_over(self, handover: Handover) -> None:
        """Keep all workers that live, and those that are missing."""

    async def let_go(self) -> Handover:
        """Keep nothing any more; end nothing that serves."""

    async def follow(self, address: str) -> None:
        """Say what the controller at this address says, until cancelled."""


class LeaderElection:
    """This controller's part in it. Belongs to the event loop."""

    def __init__(self, number: int, controllers: Controllers, workers: SupervisedWorkers) -> None:
        self._number = number
        self._controllers = controllers
        self._workers = workers
        self._one_at_a_time = asyncio.Lock()
        self._keeps = False
        self._started = asyncio.Event()
        self._stopped = False
        self._heeding: asyncio.Task[None] | None = None
        self.successor = ""
        """The listener of the controller that keeps the workers instead, host:port; empty = it is here, or unknown."""
        self.kept_at = ""
        """The same as it was known last; empty = here."""
        self._changed = asyncio.Event()

    @property
    def keeps(self) -> bool:
        """Whether the workers are this controller's."""
        return self._keeps

    async def begin(self) -> None:
        """Take over from whoever kept them, or begin with none; where a younger one was faster, follow that. Returns
        when it is clear who keeps them.
        """
        if await self._younger_or_take_over(set()) is not None:
            self._started.set()  # there is nothing that another would have to wait for
            self._heeding = asyncio.ensure_future(self._heed())
            await self.decided()

    def started(self) -> None:
        """The first start is over: another may take over from now on."""
        self._started.set()

    async def settled(self) -> None:
        """Wait until this controller keeps what it can, or says what another one says that does. Unavailable if it
        stops.
        """
        await self.decided()
        self._check_not_stopped()

    async def let_go(self) -> Handover:
        """For a younger controller, which has asked. Unavailable if this one stops, or does not keep them."""
        await self._started.wait()
        async with self._one_at_a_time:
            self._check_not_stopped()
            if not self._keeps:
                raise Unavailable("this controller does not keep the workers")
            log.info("letting go of all workers, for a younger controller")
            self._keeps = False
            self._changed.clear()
            try:
                return await self._workers.let_go()
            finally:
                self._heeding = asyncio.ensure_future(self._heed())

    async def decided(self) -> str:
        """Wait until it is clear who keeps the workers; `successor` then."""
        while not self._keeps and not self.successor and not self._stopped:
            await self._changed.wait()
        return self.successor

    async def alone(self) -> bool:
        """Whether no other controller lives."""
        return not await self._controllers.others(self._number)

    async def stop(self) -> None:
        """Heed nobody any more."""
        self._stopped = True
        self._changed.set()
        self._started.set()
        if self._heeding is not None:
            self._heeding.cancel()
            await asyncio.gather(self._heeding, return_exceptions=True)

    async def _what_is_handed_over(self) -> Handover:
        """By the youngest of the older ones that keeps the workers."""
        older = [each for each in await self._controllers.others(self._number) if each.number < self._number]
        for each in reversed(older):
            try:
                return await each.let_go()
            except Unavailable as error:
                log.info("%s", error.message)
        return Handover()

    async def _younger_or_take_over(self, over: set[int]) -> OtherController | None:
        """The youngest; where nobody younger lives but those that are over, the workers are this controller's from now
        on. Who comes after this look sees this one, asks it to let go, and waits here until it can.
        """
        async with self._one_at_a_time:
            younger = await self._youngest(over)
            if younger is not None:
                return younger
            await self._workers.take_over(await self._what_is_handed_over())
            self.successor = self.kept_at = ""
            self._keeps = True
        self._changed.set()
        return None

    async def _heed(self) -> None:
        """Until the workers are this controller's again."""
        over: set[int] = set()
        while not self._keeps:
            try:
                await self._heed_the_youngest(over)
            except Exception:
                log.exception("neither followed nor took over; trying again")
                await asyncio.sleep(AGAIN_S)

    async def _heed_the_youngest(self, over: set[int]) -> None:
        """Until it ends; where there is none but those that are over, take over."""
        successor = await self._younger_or_take_over(over)
        if successor is None:
            log.warning("no younger controller lives any more; this one has taken over")
            return
        async with self._following(successor):
            await successor.ended()
        over.add(successor.number)
        self.successor = ""
        self._changed.clear()

    @asynccontextmanager
    async def _following(self, successor: OtherController) -> AsyncIterator[None]:
        what = "following another controller"
        following = begin(going_on(partial(self._follow, successor), what), what)
        try:
            yield
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    async def _follow(self, successor: OtherController) -> None:
        try:
            self.successor = self.kept_at = await successor.settled()
        except Unavailable as error:
            log.info("%s", error.message)
            return
        self._changed.set()
        log.info("the controller at %s keeps the workers", self.successor)
        await self._workers.follow(self.successor)

    async def _youngest(self, over: set[int]) -> OtherController | None:
        others = await self._controllers.others(self._number)
        younger = [each for each in others if each.number > self._number and each.number not in over]
        return younger[-1] if younger else None

    def _check_not_stopped(self) -> None:
        if self._stopped:
            raise Unavailable("this controller stops")
