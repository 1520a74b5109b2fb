"""Heartbeats that detect a process that is alive but hangs.

A stopped process, or one whose event loop is blocked, keeps its sockets open: the kernel accepts data for it, but it
does not respond.
"""

import asyncio
from collections.abc import Callable


class Heartbeat:
    """Sends heartbeats to one process for one supervisor. Used on the supervisor's event loop only.

    Missed heartbeats are counted instead of seconds: while the supervisor itself is blocked, at most one heartbeat is
    missed, so it does not declare the process dead because of its own pause.
    """

    def __init__(self, ask: Callable[[], None], every_s: float, limit: Callable[[bool], int]) -> None:
        """Create the heartbeats; `ask` sends one to the process, and is called every `every_s` seconds.

        `limit` returns the maximum number of consecutive heartbeats without a response. Its argument is False until the
        first response, because a starting process may take longer.
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
        """Send heartbeats until too many consecutive ones have no response."""
        silent = 0
        while silent < self._limit(self._begun):
            self._responded = False
            self._ask()
            await asyncio.sleep(self._every_s)
            silent = 0 if self._responded else silent + 1

    async def resumes(self) -> None:
        """Send heartbeats until there is a response again; return up to `every_s` seconds after it."""
        self._responded = False
        while not self._responded:
            self._ask()
            await asyncio.sleep(self._every_s)
