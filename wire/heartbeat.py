"""Whether somebody who lives also works. A process that is stopped, or whose event loop stands still, keeps its sockets
open: the kernel takes what is sent to it on and on, and nobody answers.
"""

import asyncio
from collections.abc import Callable


class Heartbeat:
    """One supervisor's questions to one process. Questions are counted and no seconds: while the supervisor itself
    stands still, only one of them passes, and nobody is taken for dead for that.
    """

    def __init__(self, ask: Callable[[], None], every_s: float, limit: Callable[[bool], int]) -> None:
        """`ask` sends the question, `every_s` seconds apart. `limit` says how many of them in a row may go unanswered,
        given whether there ever was an answer: a process that starts may take longer.
        """
        self._ask = ask
        self._every_s = every_s
        self._limit = limit
        self._heard = False
        self._begun = False

    def beat(self) -> None:
        """It has answered."""
        self._heard = self._begun = True

    async def stops(self) -> None:
        """Returns when it hangs."""
        silent = 0
        while silent < self._limit(self._begun):
            self._heard = False
            self._ask()
            await asyncio.sleep(self._every_s)
            silent = 0 if self._heard else silent + 1
