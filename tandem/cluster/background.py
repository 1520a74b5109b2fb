"""Helpers for asyncio background tasks of the controller.

They log every failure, restart tasks that must keep running, and complete a change even if its caller no longer waits.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from tandem.protocol.errors import TandemError, Unavailable

log = logging.getLogger(__name__)

AGAIN_S = 1.0

Result = TypeVar("Result")


def begin(work: Coroutine[Any, Any, Result], what: str) -> asyncio.Task[Result]:
    """Start a task whose failure is logged even if no caller awaits it; `what` describes the work in the log."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda done: _log_failure(done, what))
    return task


async def going_on(run: Callable[[], Awaitable[None]], what: str) -> None:
    """Call `run`, and call it again `AGAIN_S` seconds after each failure, until it returns or is cancelled."""
    while True:
        try:
            return await run()
        except Exception:
            log.exception("%s failed; restarting it", what)
        await asyncio.sleep(AGAIN_S)


class Changes:
    """Runs changes to the cluster as tasks that continue even if their callers are cancelled.

    Used on the event loop.
    """

    def __init__(self, what: str) -> None:
        """Prepare to run changes; `what` names their kind in log messages."""
        self._what = what
        self._begun: set[asyncio.Task[Any]] = set()

    def begin(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Start a change as a task; its failure is logged even if no caller awaits it."""
        task = begin(work, self._what)
        self._begun.add(task)
        task.add_done_callback(self._begun.discard)
        return task

    async def to_its_end(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a change and return its result; the change continues if the caller is cancelled.

        Raises Unavailable if `cancel` ended the change.
        """
        task = self.begin(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            me = asyncio.current_task()
            if not task.cancelled() or (me is not None and me.cancelling()):
                raise
            # Here the change itself was cancelled, by `cancel`, and not the task that awaits it.
            raise Unavailable("another controller has taken over in the meantime; ask again") from None

    def cancel(self) -> tuple[asyncio.Task[Any], ...]:
        """Cancel all running changes and return them."""
        begun = tuple(self._begun)
        for task in begun:
            task.cancel()
        return begun


def _log_failure(done: asyncio.Task[Any], what: str) -> None:
    error = None if done.cancelled() else done.exception()
    if isinstance(error, TandemError):
        log.info("%s: %s", what, error.message)
    elif error is not None:
        log.error("%s failed", what, exc_info=error)
