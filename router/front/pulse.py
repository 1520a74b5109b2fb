"""Whether a front process does its work. One that is stopped, or stands still, keeps its stream open: the kernel gives
it its share of new connections on and on, and nobody answers these.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LOOK_S = 5.0
"""How often it is asked."""
SILENT_LOOKS = 6
"""So many looks in a row without a word of it, half a minute, and it hangs. Where two cores do all the work of a
cluster, a process may wait for a core for seconds, and each restart costs its clients their connections."""
STARTING_LOOKS = 12
"""The same before its first word: it imports its modules meanwhile, perhaps from a slow disk."""


class Pulse:
    """The router's finger on one of them. Looks are counted and no seconds: while the router itself stands still, only
    one of them passes.
    """

    def __init__(self, ask: Callable[[], None]) -> None:
        """`ask` sends the question; whatever comes is an answer."""
        self._ask = ask
        self._heard = False
        self._begun = False

    def beat(self) -> None:
        """It has said something."""
        self._heard = self._begun = True

    async def stops(self) -> None:
        """Returns when it hangs."""
        silent = 0
        while silent < (SILENT_LOOKS if self._begun else STARTING_LOOKS):
            self._heard = False
            self._ask()
            await asyncio.sleep(LOOK_S)
            silent = 0 if self._heard else silent + 1
