"""Heartbeats that detect a process that is alive but hangs.

A stopped process, or one whose event loop is blocked, keeps its sockets open: the kernel accepts data for it, but
there is no response.
"""

import asyncio
from collections.abc import Callable


class Heartbeat:
    """One supervisor's heartbeats to one process.

    Missed heartbeats are counted, not seconds: while the supervisor itself is blocked, at most one heartbeat is
    missed, so that it does not declare the process dead for that.
    """

    def __init__(self, ask: Callable[[], None], every_s: float, limit: Callable[[bool], int]) -> None:
        """`ask` sends a heartbeat request every `every_s` seconds.

        `limit` returns the most consecutive requests without a response; its argument is True once there was a
        response, because a starting process may take longer.
        """
        self._ask = ask
        self._every_s = every_s
        self._limit = limit
        self._responded = False
        self._begun = False

    def beat(self) -> None:
        """Record a response."""
        self._responded = self._begun = True

    async def stops(self) -> None:
        """Return when too many consecutive heartbeats have no response."""
        silent = 0
        while silent < self._limit(self._begun):
            self._responded = False
            self._ask()
            await asyncio.sleep(self._every_s)
            silent = 0 if self._responded else silent + 1

    async def resumes(self) -> None:
        """Return once there is a response again, at most `every_s` after it."""
        self._responded = False
        while not self._responded:
            self._ask()
            await asyncio.sleep(self._every_s)
