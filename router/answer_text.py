"""From tokens to text, off the event loop: one thread, one hop for all the requests of a step."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol

from router.detokenizer import Detokenizer
from router.stop_strings import StopStrings
from router.token_scores import TokenScore, spell
from wire.logs import about
from wire.messages import FinishReason, TokenLogprobs

if TYPE_CHECKING:
    from router.request import RoutedRequest

log = logging.getLogger(__name__)


class TokenText(Protocol):
    """What tokens mean: the tokenizer, from any thread."""

    def decode(self, ids: Sequence[int]) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...


@dataclass(slots=True)
class TextJob:
    """Tokens of one request that are next in order, and how its answer ends if it does. `text` is the result.

    `logprobs` has one entry for each token if they were asked for, else none; `scores` is what becomes of them.
    """

    request: RoutedRequest
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None
    scores: list[TokenScore] = field(default_factory=list)
    text: str = ""
    matched_stop: str = ""
    failed: bool = False
    waited: bool = False
    """Whether it was kept back for others to travel with."""


class AnswerText:
    """Detokenizer and stop strings of one answer. Only the text thread touches it."""

    __slots__ = ("_chars", "_detokenizer", "_stops", "_tokens")

    def __init__(self, tokens: TokenText, stop: Sequence[str]) -> None:
        self._tokens = tokens
        self._detokenizer = Detokenizer(tokens.decode)
        self._stops = StopStrings(stop)
        self._chars = 0

    def run(self, job: TextJob) -> None:
        """Fill in the job's text and scores; cut them, and its tokens, at a stop string."""
        if self._stops.matched:
            job.token_ids = []
            return
        out: list[str] = []
        for count, token_id in enumerate(job.token_ids, 1):
            if job.logprobs:
                job.scores.append(spell(token_id, job.logprobs[count - 1], self._chars, self._tokens.token_bytes))
            piece = self._detokenizer.add(token_id)
            self._chars += len(piece)
            out.append(self._stops.add(piece))
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
                wire_id = job.request.wire_id
                log.exception("detokenization failed for request %s", wire_id, extra=about(wire_id))
                job.failed = True
        self._loop.call_soon_threadsafe(self._deliver, jobs)
        return True
