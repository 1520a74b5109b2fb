"""From tokens to text, off the event loop: one thread, one hop for all the requests of a step."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING

from router.detokenizer import Detokenizer
from router.stop_strings import StopStrings
from wire.messages import FinishReason

if TYPE_CHECKING:
    from router.request import RoutedRequest

log = logging.getLogger(__name__)


@dataclass(slots=True)
class TextJob:
    """Tokens of one request that are next in order, and how its answer ends if it does. `text` is the result."""

    request: RoutedRequest
    token_ids: list[int]
    finish: FinishReason | None = None
    text: str = ""
    matched_stop: str = ""
    failed: bool = False


class AnswerText:
    """Detokenizer and stop strings of one answer. Only the text thread touches it."""

    __slots__ = ("_detokenizer", "_stops")

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(decode)
        self._stops = StopStrings(stop)

    def run(self, job: TextJob) -> None:
        """Fill in the job's text; cut it, and its tokens, at a stop string."""
        if self._stops.matched:
            job.token_ids = []
            return
        out: list[str] = []
        for count, token_id in enumerate(job.token_ids, 1):
            out.append(self._stops.add(self._detokenizer.add(token_id)))
            if self._stops.matched:
                job.token_ids = job.token_ids[:count]
                break
        if job.finish is not None and not self._stops.matched:
            out.append(self._stops.add(self._detokenizer.flush()))
            out.append(self._stops.flush())
        job.text = "".join(out)
        job.matched_stop = self._stops.matched


class TextThread:
    """Runs jobs in the order they come and brings them back to the event loop. Start and stop it there."""

    def __init__(self, deliver: Callable[[list[TextJob]], None]) -> None:
        self._deliver = deliver
        self._work: SimpleQueue[list[TextJob] | None] = SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="router-text", daemon=True)
        self._thread.start()

    def submit(self, jobs: list[TextJob]) -> None:
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
                log.exception("detokenization failed for request %s", job.request.wire_id)
                job.failed = True
        self._loop.call_soon_threadsafe(self._deliver, jobs)
        return True
