"""Hang detection: a live process hangs if it is stopped or if one of its event loops makes no progress.

Its supervisor then kills it and restarts it as after any other death.
"""

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable

from tandem.net.heartbeat import Heartbeat

HANG_DEADLINE_S = 30.0
"""Default of `--hang-deadline`, in seconds.

Where two cores do all the work of a cluster, a process may wait for a core for seconds, and a restart costs a worker
its weights and its requests. The default is far longer than such waits and shorter than client timeouts.
"""
START_HANG_DEADLINE_S = 120.0
"""Minimum hang deadline while a process starts, in seconds.

A starting process may hold the interpreter for long: it imports modules from a slow disk, registers memory or compiles
kernels.
"""
QUESTIONS = 6
"""Number of signs of life requested within a deadline, so that a single late one does not count as a hang."""


async def until_it_hangs(
    works: Callable[[], Awaitable[None]],
    deadline_s: float,
    *,
    starts: Callable[[], bool],
    is_there: Callable[[], bool],
) -> float:
    """Return when `works` has not completed for `deadline_s` seconds (0 = never); return that duration in seconds.

    `starts` returns True while the process starts, `is_there` returns True once there is a process to ask.
    """
    if not deadline_s:
        await asyncio.Event().wait()
    every_s = deadline_s / QUESTIONS
    start_limit = max(QUESTIONS, math.ceil(START_HANG_DEADLINE_S / every_s))
    asking: asyncio.Task[None] | None = None

    def ask() -> None:
        """Send one question at a time: the reply to an old one is as good as any."""
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
