"""Tasks that nobody awaits: what ends one unexpectedly is told, and what has to go on does."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from wire.errors import TandemError

log = logging.getLogger(__name__)

AGAIN_S = 1.0

Result = TypeVar("Result")


def begin(work: Coroutine[Any, Any, Result], what: str) -> asyncio.Task[Result]:
    """A task, whose failure is logged whether anybody waits for it or not; `what` it does, in words."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda done: _tell(done, what))
    return task


async def going_on(run: Callable[[], Awaitable[None]], what: str) -> None:
    """`run`, and again after each failure of it, until it returns or is cancelled."""
    while True:
        try:
            return await run()
        except Exception:
            log.exception("%s has failed, and goes on", what)
        await asyncio.sleep(AGAIN_S)


def _tell(done: asyncio.Task[Any], what: str) -> None:
    error = None if done.cancelled() else done.exception()
    if isinstance(error, TandemError):
        log.info("%s: %s", what, error.message)
    elif error is not None:
        log.error("%s has failed", what, exc_info=error)
