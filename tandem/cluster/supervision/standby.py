"""A standby for a process that must be replaced at once: prepared in advance, and started when the process dies."""

import asyncio
from collections.abc import Awaitable, Callable

from tandem.cluster.supervision.health import Phase
from tandem.cluster.supervision.incarnations import Incarnations
from tandem.cluster.supervision.process_supervisor import LOOK_S, Process, ProcessSupervisor


class Standby:
    """Keeps one standby of a supervised process. Belongs to the controller's event loop.

    A standby is supervised like any other process: a standby that dies or hangs is replaced.
    """

    def __init__(
        self,
        supervisor: ProcessSupervisor,
        prepare: Callable[[int], Awaitable[tuple[Process, Process]]],
        incarnations: Incarnations,
        *,
        hang_deadline_s: float,
    ) -> None:
        """Create the standby for the process of `supervisor`; both get their incarnation numbers from `incarnations`.

        `prepare` spawns a process for an incarnation and returns two handles on it: `start` of the first loads as much
        as possible in advance, `start` of the second makes the process serve.
        """
        self._keeper = supervisor
        self._prepare = prepare
        self._incarnations = incarnations
        self._hang_deadline_s = hang_deadline_s
        self._in_use: Process | None = None
        self._dead = 0
        """The incarnation that died last."""
        self._own: ProcessSupervisor | None = None
        self._stopping = False

    async def run(self) -> None:
        """Keep a standby while the process serves, until `stop`."""
        while await self._is_wanted():
            self._own = ProcessSupervisor(
                f"the standby of the {self._keeper.name}",
                self._spawn,
                lambda _: None,
                hang_deadline_s=self._hang_deadline_s,
                incarnations=self._incarnations,
            )
            await self._own.run()

    def use(self, dead: int) -> tuple[int, Process] | None:
        """Return the standby and its incarnation, to replace the incarnation `dead`; None = no standby is ready."""
        self._dead = dead
        own, self._own = self._own, None
        if own is None or self._stopping:
            return None
        if self._in_use is None or own.phase is not Phase.SERVING:
            own.stop()
            return None
        own.detach()
        return own.health().incarnation, self._in_use

    def stop(self) -> None:
        """End the standby; `run` then returns."""
        self._stopping = True
        if self._own is not None:
            self._own.stop()

    async def _is_wanted(self) -> bool:
        """Wait until the supervised process serves, and return True; return False after `stop`.

        The preparation of the standby takes seconds of CPU time, which the supervised process needs first.
        """
        while not self._stopping:
            now = self._keeper.health()
            if now.phase is Phase.SERVING and now.incarnation != self._dead:
                return True
            await asyncio.sleep(LOOK_S)
        return False

    async def _spawn(self, incarnation: int) -> Process:
        standby, self._in_use = await self._prepare(incarnation)
        return standby
