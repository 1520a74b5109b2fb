"""One request in the prefill phase: its task, its pages and its progress."""

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
from tandem.protocol.lifecycle.events import EventTime, LifecycleEvent
from tandem.protocol.messages import PrefillTask

log = logging.getLogger(__name__)


class Abortable(Protocol):
    """A hand-over that can be aborted."""

    def abort(self) -> None:
        """Abort the hand-over."""
        ...


@dataclass(slots=True, eq=False)
class PrefillRequest:
    """A request in the prefill phase, with the task that it was created for.

    The queues of a request:

      1. waiting       has no pages yet (PREFILL_QUEUED)
      2. computing     has pages for the whole prompt; the first of them may be cached pages, which it only reads. The
                       other pages are computed in chunks (PREFILL_STARTED), and pages of finished chunks are already
                       being written to the decode worker
      3. handing over  the prompt is computed, the first token was sent (PREFILL_FINISHED), and other requests may read
                       its full pages; the last pages are being written

    Then `free` is called, and the pages are free or cached. The hand-over ends every request, whether it was computed
    completely or not, and nothing else frees its pages.

    All fields are guarded by the scheduler's lock; `progress` is used on the event loop.
    """

    task: PrefillTask
    pages_needed: int
    """The number of pages that the prompt fills in a group without a sliding window."""
    local: bool
    """True if this worker also decodes the request: its KV is computed in pages of the decode phase's lease."""
    progress: Progress
    prefix: Prefix
    """The part of the prompt that is in the prefix cache. The request reads `prefix.pages` until it is freed."""
    token_hash: bytes = b""
    """The hash of the prompt's tokens, for a local prompt; else empty."""
    arrival: int = 0
    """The request's number in the order of arrival, from 1."""
    adapter: int = 0
    """The number of the request's adapter, as in `StepRow`."""
    handoff: Abortable | None = None
    pages: list[int] = field(default_factory=list)
    """The request's pages, listed as by `KvPages`.

    Entries of groups with a sliding window are filled chunk by chunk.
    """
    reserved_pages: int = 0
    """The number of pages of groups with a sliding window that the request may still take."""
    backed_pages: int = 0
    """The number of `reserved_pages` for which the pool keeps free pages."""
    cached: int = 0
    """The number of prompt tokens that are not computed, because their KV was found in cached pages."""
    reloaded: int = 0
    """The part of `cached` whose KV was loaded from a tier of the prefix cache for this prompt."""
    indexed: int = 0
    """The number of leading prompt tokens whose pages are indexed, in models with state layers; at least `cached`."""
    computed: int = 0
    """The number of prompt tokens whose KV is in the pages, cached or computed."""
    launched: int = 0
    """The number of prompt tokens that are cached, computed or in a launched step."""
    in_flight: int = 0
    """The number of launched steps with a chunk of the request that have not completed.

    If it is 0, no step uses the request's pages.
    """
    withdrawn: bool = False
    """True if no further chunk of the request is computed."""
    scores: PromptScores | None = None
    """The log probabilities of the prompt tokens computed so far, if the task wants them."""
    event_times: list[EventTime] = field(default_factory=list)
    """The lifecycle events so far; they are sent with the first token."""
    history: History | None = None
    """The tokens that penalties or a grammar depend on, if the task has either."""

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of the prompt."""
        return len(self.task.prompt_token_ids)

    @property
    def remaining(self) -> int:
        """The number of prompt tokens that are in no launched step."""
        return self.prompt_tokens - self.launched

    def next_chunk(self, budget: int) -> StepRow:
        """Return a row with the next chunk, of at most `budget` tokens, and mark these tokens as launched.

        The row with the last chunk samples a token.
        """
        if self.launched == self.cached:
            self.event_times.append(EventTime.now(LifecycleEvent.PREFILL_STARTED))
        start, chunk = self.launched, min(budget, self.remaining)
        sampling_input = self._first_draw() if chunk == self.remaining else None
        self.launched += chunk
        self.in_flight += 1
        return StepRow(
            self.task.prompt_token_ids[start : start + chunk], start, list(self.pages), sampling_input,
            scores=self.scores, adapter=self.adapter,
        )  # fmt: skip

    def _first_draw(self) -> SamplingInput:
        task = self.task
        if task.sampling.needs_history and self.history is None:
            self.history = History(task.original_prompt, task.answer)
        return SamplingInput(task.sampling, task.prior_output_tokens, self.history)


class EventThread(Protocol):
    """The interface of the event loop on which updates are delivered."""

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any) -> object:
        """Schedule a call on the event loop, from any thread."""
        ...


class ProgressUpdates:
    """Collects calls and schedules them on the event loop, in the order in which they were added.

    Used on the engine thread only. Owned by the prefill scheduler.
    """

    def __init__(self, events: EventThread) -> None:
        self._events = events
        self._calls: list[Callable[[], None]] = []

    def add(self, call: Callable[[], None]) -> None:
        """Add a call; the next delivery includes it."""
        self._calls.append(call)

    def take(self) -> Sequence[Callable[[], None]]:
        """Remove and return all collected calls; the caller delivers them."""
        calls, self._calls = self._calls, []
        return calls

    def deliver(self) -> None:
        """Schedule all collected calls on the event loop."""
        if calls := self.take():
            self._events.call_soon_threadsafe(call_all, calls)


def call_all(calls: Iterable[Callable[[], None]]) -> None:
    """Make all calls, even if one of them raises an error, because the calls concern different requests."""
    for call in calls:
        try:
            call()
        except Exception:
            log.exception("a hand-over did not hear of its step")
