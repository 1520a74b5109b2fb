"""Heartbeats that detect a process that is alive but hangs.

If a process is stopped or its event loop is blocked, its sockets stay open: the kernel accepts data for the process,
but no response comes.
"""

import asyncio
from collections.abc import Callable


class Heartbeat:
    """Sends heartbeats to one process for one supervisor. Used on the supervisor's event loop only.

    The limit is a number of missed heartbeats, not of seconds: while the supervisor itself is blocked, at most one
    heartbeat is missed. The supervisor therefore does not declare a process dead because of its own pause.
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
