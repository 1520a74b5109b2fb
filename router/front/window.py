"""How far an answer may run ahead of its client: what the client has not taken waits at its source, which makes fewer
and larger pieces of it, instead of in the front process.
"""

from __future__ import annotations

import asyncio

AHEAD_MAX = 64
"""Messages of one call on their way to the client."""
TOLD_EVERY = 16
"""Messages passed on, after which a front process says so."""


class Window:
    """The router's count of one call. Belongs to the event loop."""

    def __init__(self) -> None:
        self._ahead = 0
        self._lifted = False
        self._changed = asyncio.Event()

    async def sent(self) -> None:
        """One more was; returns when another may be."""
        self._ahead += 1
        while self._ahead >= AHEAD_MAX and not self._lifted:
            self._changed.clear()
            await self._changed.wait()

    def passed(self, count: int) -> None:
        """So many more were passed on to the client."""
        self._ahead -= count
        self._changed.set()

    def lift(self) -> None:
        """The client is gone: nobody waits for it."""
        self._lifted = True
        self._changed.set()
