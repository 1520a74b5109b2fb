"""Background tasks: an unexpected end is logged, and tasks that must keep running are restarted."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from wire.errors import TandemError

log = logging.getLogger(__name__)

AGAIN_S = 1.0

Result = TypeVar("Result")


def begin(work: Coroutine[Any, Any, Result], what: str) -> asyncio.Task[Result]:
    """Starts a task whose failure is logged even if no caller awaits it; `what` describes the work in the log."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda done: _log_failure(done, what))
    return task


async def going_on(run: Callable[[], Awaitable[None]], what: str) -> None:
    """Runs `run`, and runs it again after each failure, until it returns or is cancelled."""
    while True:
        try:
            return await run()
        except Exception:
            log.exception("%s failed; restarting it", what)
        await asyncio.sleep(AGAIN_S)


def _log_failure(done: asyncio.Task[Any], what: str) -> None:
    error = None if done.cancelled() else done.exception()
    if isinstance(error, TandemError):
        log.info("%s: %s", what, error.message)
    elif error is not None:
        log.error("%s failed", what, exc_info=error)
