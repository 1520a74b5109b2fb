"""Detokenizes outside the event loop, in one thread, which gets the tokens of several requests as one batch."""

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

from router.requests.request import RoutedRequest
from router.text.answer_text import TextJob
from tandem.logging.logs import about
from tandem.protocol.errors import TandemError

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class RequestText(TextJob):
    """The next tokens of one request to detokenize, and the finish reason or error if the answer ends with them.

    The event loop makes it, the text thread fills in the text, and the event loop delivers it.
    """

    request: RoutedRequest
    failed: bool = False
    """True if detokenization raised."""
    waited: bool = False
    """True if the tokens waited to be sent together with later tokens."""
    error: TandemError | None = None
    """The error that ends the answer after these tokens; None if there is none."""


class TextThread:
    """The thread that detokenizes batches in order; results are delivered on the event loop.

    The `EventStream` owns it; it must be created and stopped on the event loop.
    """

    def __init__(self, deliver: Callable[[list[RequestText]], None]) -> None:
        self._deliver = deliver
        self._work: SimpleQueue[list[RequestText] | None] = SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="router-text", daemon=True)
        self._thread.start()

    def submit(self, jobs: list[RequestText]) -> None:
        """Queue a batch of texts to detokenize, which is delivered as a whole."""
        self._work.put(jobs)

    async def stop(self) -> None:
        """Stop the thread after all queued batches."""
        self._work.put(None)
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        # A separate function, so that no local variable keeps the last step's requests alive while the thread waits.
        jobs = self._work.get()
        if jobs is None:
            return False
        for job in jobs:
            try:
                job.request.text.run(job)
            except Exception:
                internal_id = job.request.internal_id
                log.exception("detokenization failed for request %s", internal_id, extra=about(internal_id))
                job.failed = True
        self._loop.call_soon_threadsafe(self._deliver, jobs)
        return True
