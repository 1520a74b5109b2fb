"""One prompt in the prefill half."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from prefill_worker.progress import Progress
from tandem.engine.cache.prefix_cache import Prefix
from tandem.engine.steps.batch import StepRow
from tandem.engine.steps.prompt_scoring import PromptScores
from tandem.engine.steps.sampling_metadata import History, SamplingInput
from tandem.protocol.lifecycle.timeline import Edge, EdgeStamp
from tandem.protocol.messages import PrefillTask

log = logging.getLogger(__name__)


class Abortable(Protocol):
    """A hand-over that can be aborted."""

    def abort(self) -> None:
        """Aborts the hand-over."""
        ...


@dataclass(slots=True, eq=False)
class PrefillRequest:
    """A task and what became of it so far.

    Its queues:
      1. waiting       no pages yet (PREFILL_QUEUED)
      2. computing     has pages for the whole prompt, the first of them perhaps cached ones, which it only reads; the
                       rest is packed into steps in chunks (PREFILL_STARTED), pages of finished chunks are already
                       being written to the decode worker
      3. handing over  all is computed, the first token is out (PREFILL_FINISHED) and others may read its full pages;
                       the last pages are on their way
    then `free`: the pages are free or cached. The handoff ends every request, finished or not; nobody else frees.

    All fields are guarded by the half's lock; `progress` belongs to the event loop.
    """

    task: PrefillTask
    pages_needed: int
    local: bool
    """True if the KV is built in pages that this worker's own decode half allotted; the lease owns them."""
    progress: Progress
    prefix: Prefix
    """The part of the prompt that the prefix cache knows; this request reads `prefix.pages` until it is freed."""
    token_hash: bytes = b""
    """The hash of the tokens of a local prompt."""
    arrival: int = 0
    """The number of prompts that the queue had taken when it came."""
    adapter: int = 0
    """The number of its adapter, as in `StepRow`."""
    handoff: Abortable | None = None
    pages: list[int] = field(default_factory=list)
    """Its pages as `KvPages` lists them; the entries of groups with a window are filled chunk by chunk."""
    claimed: int = 0
    """Pages of groups with a window that it needs besides those that it holds."""
    promised: int = 0
    """The part of them that the pool has promised."""
    cached: int = 0
    """Tokens of the prompt whose KV was in cached pages: never computed."""
    computed: int = 0
    """Tokens of the prompt whose KV is in the pages."""
    launched: int = 0
    """Tokens that are cached, computed or in a step that was launched."""
    in_flight: int = 0
    """Launched steps with a chunk of it that have not ended; 0: the engine does not touch its pages now."""
    withdrawn: bool = False
    scores: PromptScores | None = None
    """The log probabilities of the prompt's tokens if the task asks for them, as far as they are computed."""
    edges: list[EdgeStamp] = field(default_factory=list)
    history: History | None = None
    """The tokens that penalties or a grammar look back on, if there are any such."""

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of the prompt."""
        return len(self.task.prompt_token_ids)

    @property
    def remaining(self) -> int:
        """Tokens that no step was launched for."""
        return self.prompt_tokens - self.launched

    def next_chunk(self, budget: int) -> StepRow:
        """A row of at most `budget` tokens, which are launched now; with a draw if they are the last ones."""
        if self.launched == self.cached:
            self.edges.append(EdgeStamp.now(Edge.PREFILL_STARTED))
        start, chunk = self.launched, min(budget, self.remaining)
        draw = self._first_draw() if chunk == self.remaining else None
        self.launched += chunk
        self.in_flight += 1
        return StepRow(
            self.task.prompt_token_ids[start : start + chunk], start, list(self.pages), draw, scores=self.scores,
            adapter=self.adapter,
        )  # fmt: skip

    def _first_draw(self) -> SamplingInput:
        task = self.task
        if task.sampling.needs_history and self.history is None:
            self.history = History(task.question, task.answer)
        return SamplingInput(task.sampling, task.answered, self.history)


class EventThread(Protocol):
    """The event loop on which updates are delivered."""

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any) -> object:
        """Schedules a call on the event loop, from any thread."""
        ...


class ProgressUpdates:
    """Calls to be made on the event loop, in order. Only the engine thread uses it."""

    def __init__(self, events: EventThread) -> None:
        self._events = events
        self._calls: list[Callable[[], None]] = []

    def add(self, call: Callable[[], None]) -> None:
        """Deliver this call with the next ones."""
        self._calls.append(call)

    def take(self) -> Sequence[Callable[[], None]]:
        """Return all calls, to a caller who delivers them."""
        calls, self._calls = self._calls, []
        return calls

    def deliver(self) -> None:
        """Have the event loop make the calls."""
        if calls := self.take():
            self._events.call_soon_threadsafe(call_all, calls)


def call_all(calls: Iterable[Callable[[], None]]) -> None:
    """Make each call, even if others fail: they concern different requests."""
    for call in calls:
        try:
            call()
        except Exception:
            log.exception("a hand-over did not hear of its step")
