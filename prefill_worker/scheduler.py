"""The prefill scheduler: chooses the prompt chunks of each step, and processes the step's results.

The path of a request, by its queues (`prefill_worker/request.py`):

  1. `submit`    appends the request to the queue and starts its hand-over
  2. `schedule`  the queue (`queue.py`) chooses the prompts that are computed, the shortest first, up to the token
                 budget of the step. Pages for the whole prompt (`prompt_pages.py`) are allocated only now, so that the
                 prompt can use the KV that earlier prompts have left in the cache; pages of groups with a sliding
                 window are allocated chunk by chunk
  3. `apply`     adds the computed tokens to the progress; the last chunk gives the first token of the answer. The next
                 step may be in flight by then. A local prompt passes to the decode phase before `apply` returns, and
                 decodes from the next planned step on
  4. `take_updates` returns the progress updates for the hand-overs, which write the pages of all prompts that are not
                 local, end the request and call `free`

`schedule`, `apply`, `take_updates` and `deliver_updates` are called on the engine thread, all other methods on the
event loop. One lock guards both, and no call waits for anything but this lock.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from kv_transfer.lost_pages import LostPages
from prefill_worker.decode_peers import LocalDecode
from prefill_worker.notice import make_notice
from prefill_worker.progress import Progress
from prefill_worker.prompt_pages import PromptPages
from prefill_worker.queue import NO_PROMPTS, InFlightSteps, PromptQueue, ScoredTokens, StartResult, WaitingPrompts
from prefill_worker.registry import PendingTransfers, RequestRegistry
from prefill_worker.request import Abortable, EventThread, PrefillRequest, ProgressUpdates
from tandem.engine.cache.prefix_cache import PrefixCache
from tandem.engine.steps.batch import StepRow
from tandem.engine.steps.prompt_scoring import PromptScores
from tandem.engine.steps.sampling_metadata import NO_TOKEN, History
from tandem.logging.logs import about
from tandem.protocol.ending import reason_to_end
from tandem.protocol.errors import Internal, InvalidArgument, NonFiniteLogits, TandemError
from tandem.protocol.lifecycle.events import EventTime, LifecycleEvent
from tandem.protocol.messages import (
    ModelFacts,
    PeerRef,
    PrefillTask,
    RequestEvent,
    RequestRef,
    RoutedEvent,
    TokenLogprobs,
    TransferNotice,
    hash_token_ids,
)
from tandem.settings.worker import WorkerSettings

log = logging.getLogger(__name__)


class PrefillScheduler:
    """Plans prefill chunks and processes their results.

    Owns the submitted prompts and, through their hand-overs, the pages that were allocated for them.
    """

    def __init__(
        self,
        *,
        config: WorkerSettings,
        me: PeerRef,
        cache: PrefixCache,
        model: ModelFacts,
        local: LocalDecode,
        begin_handoff: Callable[[PrefillRequest, PrefillScheduler], Abortable],
        wake: Callable[[], None],
        events: EventThread,
    ) -> None:
        """Create the scheduler.

        `begin_handoff` starts a request's hand-over, which ends the request. `wake` wakes the step loop when there may
        be work.
        """
        self._config = config
        self._me = me
        self._cache = cache
        self._windowed = cache.kv.windowed
        self._local = local
        self._pages = PromptPages(cache, me, local)
        self._pages_total = cache.pool.counts().total
        self._pending_transfers = PendingTransfers(
            LostPages(me.worker_id, config.kv_quarantine_share), self._pages_total
        )
        self._model = model
        self._begin_handoff = begin_handoff
        self._wake = wake
        self._lock = threading.Lock()
        self.registry = RequestRegistry(me, config.max_prefill_requests)
        """The requests from their arrival to the end of their hand-over. Changed on the event loop."""
        self.queue = PromptQueue()
        """The prompts that are not computed completely. Guarded by the scheduler's lock, except for its `length`."""
        self.scored_tokens = ScoredTokens()
        """The adaptive limit on scored prompt tokens per step. Used on the engine thread only."""
        self._steps = InFlightSteps()
        self._updates = ProgressUpdates(events)

    @property
    def fenced(self) -> int:
        """The number of attempts that were rejected because a newer attempt was known."""
        return self.registry.fenced

    # ---- event loop: requests come and go ----

    def submit(self, task: PrefillTask, adapter: int = 0, history: History | None = None) -> None:
        """Accept a validated task. A repeated attempt is ignored; a newer attempt replaces an older one.

        `history` has the grammar's state for the first sampled token; None without a grammar. Raises StaleEpoch if a
        newer attempt is known, ResourceExhausted if the worker has too many requests or is not ready, RoleClosed while
        closed, and InvalidArgument if the prompt can never fit the page pool.
        """
        request = self._make(task, adapter, history)
        with self._lock:
            if self.registry.knows(task):
                return
            self.registry.check_accepts(task, self._pending_transfers.not_ready)
            replaced = self.registry.add(request)
            self.queue.add(request)
        if replaced is not None and replaced.handoff is not None:
            replaced.handoff.abort()
        request.handoff = self._begin_handoff(request, self)
        self._wake()

    def check_accepts(self, task: PrefillTask) -> None:
        """Raise the errors of `submit` for a validated task, unless it is a repeated attempt."""
        self._check_fits(task)
        with self._lock:
            if not self.registry.knows(task):
                self.registry.check_accepts(task, self._pending_transfers.not_ready)

    def abort(self, router_id: str, refs: Iterable[RequestRef]) -> None:
        """Abort these requests if their attempt is at most the one in `refs`.

        Unknown requests are ignored; no event is sent.
        """
        for ref in refs:
            with self._lock:
                request = self.registry.find(router_id, ref)
            if request is not None and request.handoff is not None:
                request.handoff.abort()

    def abort_router(self, router_id: str) -> list[RequestRef]:
        """Abort every request of a router and return the references of these requests."""
        with self._lock:
            refs = [request.task.ref for owner, request in self.registry if owner == router_id]
        self.abort(router_id, refs)
        return refs

    def refs(self) -> list[tuple[str, RequestRef]]:
        """Return every request that has not been freed, as pairs of router id and reference of the newest attempt."""
        with self._lock:
            return [(router_id, request.task.ref) for router_id, request in self.registry]

    def close(self, why: str) -> None:
        """Reject new prompts until `open`; accepted ones continue. `why` becomes part of the error message."""
        self.registry.closed = why

    def open(self) -> None:
        """Accept prompts again after `close`."""
        self.registry.closed = ""

    def withdraw(self, request: PrefillRequest) -> None:
        """Stop computing chunks of this request; `request.progress` reports when the engine has released its pages."""
        with self._lock:
            request.withdrawn = True
            if request.in_flight:
                return
            # A step in flight still writes to the pages of the request: `apply` releases it when the step has
            # completed.
            self.queue.remove(request)
        request.progress.release()

    def transfer_outlives_request(self, request: PrefillRequest) -> None:
        """Record that a request has ended while its writes continue. Its pages count as lost until `free` is called."""
        with self._lock:
            self._pending_transfers.add(request)

    def free(self, request: PrefillRequest) -> None:
        """Free the pages of a request.

        The caller guarantees that no step uses them (the engine has released the request) and that no write reads them.
        """
        with self._lock:
            self.registry.remove(request)
            self._pending_transfers.discard(request)
            self._pages.release(request)
        # Breaks a reference cycle, which would keep the request, its hand-over and all its writes until the garbage
        # collector runs.
        request.handoff = None
        self._wake()

    def abandon(self) -> list[tuple[str, RequestRef]]:
        """Withdraw the requests of launched steps, because the engine is lost.

        Returns these requests as pairs of router id and request reference.
        """
        with self._lock:
            left = self._steps.abandon()
        for request in left:
            self.withdraw(request)
        return [(request.task.router_id, request.task.ref) for request in left]

    # ---- engine thread: a step ----

    def schedule(self, budget: int) -> list[StepRow]:
        """Return prefill rows for the next step, with at most `budget` tokens in total.

        Allocates the pages of prompts that start. In models with sliding windows, also releases the pages that have
        left a request's window and allocates those of its chunk. A row is shortened or left out if there are too few
        pages; a request whose allocation fails is removed and its hand-over fails, unless a step with a row of it is in
        flight.
        """
        with self._lock:
            planned = self.queue.plan(budget, self._config.max_prefill_rows, self._start, self.scored_tokens.most)
            if self._windowed:
                planned = [(request, self._cover(request, tokens)) for request, tokens in planned]
            step = [(request, tokens) for request, tokens in planned if tokens]
            self.deliver_updates()
            if step:
                self._steps.add(step)
            return [request.next_chunk(tokens) for request, tokens in step]

    def apply(
        self, token_ids: Sequence[int | None], logprobs: Sequence[TokenLogprobs | None] = ()
    ) -> list[RoutedEvent]:
        """Process the results of the oldest step in flight, row by row, and return the events for the routers.

        `logprobs` is empty or has an entry for each row.
        """
        events: list[RoutedEvent] = []
        arrived: list[tuple[PrefillRequest, TransferNotice, Sequence[int]]] = []
        scores = logprobs or (None,) * len(token_ids)
        with self._lock:
            step = self._steps.complete() if token_ids else ()
            for (request, chunk), token_id, score in zip(step, token_ids, scores, strict=True):
                request.computed += chunk
                request.in_flight -= 1
                if request.withdrawn:
                    if not request.in_flight:
                        self.queue.remove(request)
                        self._updates.add(request.progress.release)
                elif token_id is None:
                    self._updates.add(partial(request.progress.advance, request.computed))
                else:
                    self.queue.remove(request)
                    try:
                        event = self._finish(request, token_id, () if score is None else (score,))
                        if request.local and event.event.finish_reason is None:
                            arrived.append((request, self._local_notice(request, token_id), request.pages))
                        events.append(event)
                    except Exception as error:
                        self._fail(request, error)
        # Local prompts are handed over without this lock, because the decode phase takes its own.
        for request, notice, pages in arrived:
            try:
                self._local.notice(notice, pages, request.prefix.states)
            except Exception as error:
                self._fail(request, error)
        return events

    def _fail(self, request: PrefillRequest, error: Exception) -> None:
        """Fail one prompt after `error` was raised while its result was processed; other prompts continue.

        The prompt's hand-over sends the failure to the router.
        """
        reason: TandemError
        if isinstance(error, InvalidArgument | NonFiniteLogits):
            reason = error
        else:
            request_id = request.task.ref.request_id
            log.error("request %s met a defect", request_id, exc_info=error, extra=about(request_id))
            reason = Internal("the result of the request's prompt could not be handled; see the worker's log")
        self._updates.add(partial(request.progress.release, reason))

    def take_updates(self) -> Sequence[Callable[[], None]]:
        """Return the last step's updates for the hand-overs; they must be delivered after the step's events."""
        return self._updates.take()

    def deliver_updates(self) -> None:
        """Deliver the collected updates on the event loop at once, without a step's events."""
        self._updates.deliver()

    # ---- facts ----

    def waiting_tokens(self) -> int:
        """Return the number of prompt tokens that are not computed yet."""
        if not len(self.queue):
            return 0
        with self._lock:
            return sum(request.prompt_tokens - request.computed for request in self.queue)

    def waiting(self) -> WaitingPrompts:
        """Return a summary of the prompts that the next step could compute."""
        if not len(self.queue):
            return NO_PROMPTS
        with self._lock:
            return self.queue.waiting()

    @property
    def not_ready(self) -> str:
        """The reason why prompts are rejected because of lost pages; empty if they are accepted."""
        return self._pending_transfers.not_ready

    def pending_transfer_pages(self) -> int:
        """Return the number of KV pages of ended prompts that are still read by writes."""
        with self._lock:
            return self._pending_transfers.pages

    def known_requests(self) -> int:
        """Return the number of requests whose hand-over has not ended."""
        with self._lock:
            return len(self.registry)

    # ---- inside ----

    def _check_fits(self, task: PrefillTask) -> None:
        pages = self._cache.kv.held(len(task.prompt_token_ids))
        if pages > self._pages_total:
            raise InvalidArgument(
                "prompt_token_ids", f"needs {pages} KV pages and worker {self._me.worker_id} has {self._pages_total}"
            )

    def _make(self, task: PrefillTask, adapter: int, history: History | None) -> PrefillRequest:
        self._check_fits(task)
        kv, tokens = self._cache.kv, len(task.prompt_token_ids)
        local = task.destination is not None and task.destination.peer == self._me
        prefix = self._cache.prefix(
            task.prompt_token_ids,
            task.cache_salt,
            reads=not task.scores_prompt,
            tenant=task.tenant,
            retention_s=task.retention_s,
            hinted_s=task.hinted_s,
            hinted_tokens=task.hinted_tokens,
        )
        token_hash = hash_token_ids(task.prompt_token_ids) if local else b""
        event_times = [EventTime.now(LifecycleEvent.PREFILL_QUEUED)]
        scores = PromptScores(task.original_prompt, task.sampling.prompt_logprobs or 0) if task.scores_prompt else None
        return PrefillRequest(
            task, kv.numbers(tokens), local, Progress(), prefix, token_hash, scores=scores, event_times=event_times,
            adapter=adapter, history=history,
        )  # fmt: skip

    def _start(self, request: PrefillRequest) -> StartResult:
        """Allocate the pages of a request, if there are enough."""
        try:
            if not self._pages.take(request):
                return StartResult.NO_PAGES
        except TandemError as error:
            self._updates.add(partial(request.progress.release, error))
            return StartResult.FAILED
        if request.cached:
            self._updates.add(partial(request.progress.advance, request.cached))
        return StartResult.STARTED

    def _cover(self, request: PrefillRequest, tokens: int) -> int:
        """Allocate the pages of a chunk, and return how many of its tokens have pages."""
        try:
            return self._pages.cover(request, tokens)
        except TandemError as error:
            if not request.in_flight:  # otherwise it fails when the step in flight has completed
                self.queue.remove(request)
                self._updates.add(partial(request.progress.release, error))
            return 0

    def _finish(self, request: PrefillRequest, token_id: int, logprobs: tuple[TokenLogprobs, ...]) -> RoutedEvent:
        task, scores = request.task, request.scores
        if request.history is not None and request.history.failure is not None:
            raise request.history.failure
        if token_id == NO_TOKEN or (scores is not None and not scores.finite):
            raise NonFiniteLogits
        index = task.prior_output_tokens
        reason = reason_to_end(token_id, index, task.original_prompt_tokens, task.sampling, self._model)
        self._pages.publish(request)
        request.event_times.append(EventTime.now(LifecycleEvent.PREFILL_FINISHED))
        self._updates.add(partial(request.progress.finish, token_id, reason))
        event = RequestEvent(
            task.ref,
            index,
            (token_id,),
            reason,
            event_times=tuple(request.event_times),
            logprobs=logprobs,
            cached_tokens=request.cached,
            prompt_logprobs=None if scores is None else scores.result(),
            reloaded_tokens=request.reloaded,
        )
        return RoutedEvent(task.router_id, event)

    def _local_notice(self, request: PrefillRequest, token_id: int) -> TransferNotice:
        """Return the notice of a local prompt, whose KV was computed in pages of this worker's decode phase."""
        skipped = request.cached // self._cache.page_tokens
        return make_notice(request, self._me, token_id, token_hash=request.token_hash, skipped=skipped)
