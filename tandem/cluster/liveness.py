"""Hang detection: a live process hangs if a signal has stopped it or if one of its event loops makes no progress.

The supervisor kills such a process and restarts it as after any other death.
"""

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable

from tandem.net.heartbeat import Heartbeat

START_HANG_DEADLINE_S = 120.0
"""Minimum hang deadline while a process starts, in seconds.

A starting process may hold the interpreter lock for long: it imports modules from a slow disk, registers memory or
compiles kernels.
"""
PROBES = 6
"""Number of liveness probes within one deadline, so that a single late reply does not count as a hang."""


async def until_it_hangs(
    works: Callable[[], Awaitable[None]],
    deadline_s: float,
    *,
    starts: Callable[[], bool],
    is_there: Callable[[], bool],
) -> float:
    """Wait until the process has answered no liveness probe for a whole deadline; return that deadline in seconds.

    The deadline is `deadline_s` seconds (0 = wait forever), but at least `START_HANG_DEADLINE_S` while the process
    starts. `works` is one probe of the process; an error counts as a sign of life. `starts` returns True while the
    process starts, `is_there` returns True once there is a process to probe.
    """
    if not deadline_s:
        await asyncio.Event().wait()
    every_s = deadline_s / PROBES
    start_limit = max(PROBES, math.ceil(START_HANG_DEADLINE_S / every_s))
    asking: asyncio.Task[None] | None = None

    def ask() -> None:
        """Send a probe, unless the previous one is pending: a late reply to that one is a sign of life as well."""
        nonlocal asking
        if not is_there():
            heartbeat.beat()
        elif asking is None or asking.done():
            asking = asyncio.create_task(_ask(works, heartbeat))

    def limit(_begun: bool) -> int:
        return start_limit if starts() else PROBES

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
