"""When a process that lives counts as one that hangs: it is stopped, or one of its event loops stands still.

Whoever keeps it kills it then, and starts it again as after any other death.
"""

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable

from wire.heartbeat import Heartbeat

HANG_DEADLINE_S = 30.0
"""Default of `--hang-deadline`, in seconds. Where two cores do all the work of a cluster a process may wait for a core
for seconds, and a restart costs a worker its weights and its requests: this is far longer than such waits, and shorter
than what clients wait for."""
START_HANG_DEADLINE_S = 120.0
"""The same, at least, while a process starts: it may hold the interpreter for long as it imports modules from a slow
disk, registers its memory or compiles kernels."""
QUESTIONS = 6
"""So many signs of life are asked for within a deadline: one that is late means nothing."""


async def until_it_hangs(
    works: Callable[[], Awaitable[None]],
    deadline_s: float,
    *,
    starts: Callable[[], bool],
    is_there: Callable[[], bool],
) -> float:
    """Returns when nothing has come back from `works` for `deadline_s` seconds, 0 = never; for how long, in seconds.

    `starts` says whether the process starts still, `is_there` whether there is one to be asked yet.
    """
    if not deadline_s:
        await asyncio.Event().wait()
    every_s = deadline_s / QUESTIONS
    start_limit = max(QUESTIONS, math.ceil(START_HANG_DEADLINE_S / every_s))
    asking: asyncio.Task[None] | None = None

    def ask() -> None:
        """One question at a time: the answer to an old one is as good as any."""
        nonlocal asking
        if not is_there():
            heartbeat.beat()
        elif asking is None or asking.done():
            asking = asyncio.create_task(_ask(works, heartbeat))

    def limit(_begun: bool) -> int:
        return start_limit if starts() else QUESTIONS

    heartbeat = Heartbeat(ask, every_s, limit)
    try:
        await heartbeat.stops()
    finally:
        if asking is not None:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
    return limit(True) * every_s


async def _ask(works: Callable[[], Awaitable[None]], heartbeat: Heartbeat) -> None:
    with contextlib.suppress(Exception):  # an error is a sign of life
        await works()
    heartbeat.beat()
