"""Off the event loop, tokens become text: one thread, one hop for all the requests of a step."""

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

from router.requests.request import RoutedRequest
from router.text.answer_text import TextJob
from wire.errors import TandemError
from wire.logging.logs import about

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class RequestText(TextJob):
    """Of this request."""

    request: RoutedRequest
    failed: bool = False
    waited: bool = False
    """Whether it was kept back for others to travel with."""
    error: TandemError | None = None
    """What the answer ends with behind these tokens."""


class TextThread:
    """Runs jobs in the order they come and brings them back to the event loop. Start and stop it there."""

    def __init__(self, deliver: Callable[[list[RequestText]], None]) -> None:
        self._deliver = deliver
        self._work: SimpleQueue[list[RequestText] | None] = SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="router-text", daemon=True)
        self._thread.start()

    def submit(self, jobs: list[RequestText]) -> None:
        """Take the jobs of one step."""
        self._work.put(jobs)

    async def stop(self) -> None:
        """End after the jobs that were taken."""
        self._work.put(None)
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        # A frame of its own: while the thread waits, it must not hold the last step's requests.
        jobs = self._work.get()
        if jobs is None:
            return False
        for job in jobs:
            try:
                job.request.text.run(job)
            except Exception:
                wire_id = job.request.wire_id
                log.exception("detokenization failed for request %s", wire_id, extra=about(wire_id))
                job.failed = True
        self._loop.call_soon_threadsafe(self._deliver, jobs)
        return True
