"""The decode scheduler: plans the decode rows of each step, normally one token for each running request.

A step may be planned while the previous step runs; the newest token of a request is then given as its row in the
previous step.

The path of a request, by its queues (`decode_worker/request.py`):

  1. and 2. belong to `decode_worker/admission.py`
  3. `schedule`  takes ready requests into the batch between two steps, and gives each request one row. If a request
                 needs a page and none is free, the youngest request is preempted (`preemption.py`), or the request
                 waits
  4. `apply`     appends the sampled tokens; a request that ends or is preempted leaves, and its pages are freed, once
                 no step uses them

All methods are called on the engine thread. `decode_worker/running_batch.py` keeps the data of the requests as columns.
"""

import threading
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import cast

from decode_worker.batch_snapshot import DecodedStep
from decode_worker.draft_choice import StepBounds
from decode_worker.drafting_batch import DraftingBatch
from decode_worker.model_speculation import speculation_of
from decode_worker.preemption import age
from decode_worker.request import DecodeRequest, Stage
from decode_worker.requests import DecodeRequests
from decode_worker.running_batch import RunningBatch
from decode_worker.speculation import Speculation
from decode_worker.token_events import event_or_failure
from tandem.engine.grammar_masks import AllowedDrafts
from tandem.engine.speculation.proposer import Proposer
from tandem.engine.steps.batch import TokenRows
from tandem.engine.steps.sampling_metadata import History
from tandem.protocol.ending import Ending
from tandem.protocol.kv_pages import KvPages
from tandem.protocol.lifecycle.events import EventTime, LifecycleEvent
from tandem.protocol.messages import ModelFacts, RequestRef, TokenLogprobs

NO_ROWS = TokenRows.of(())


class DecodeScheduler:
    """Plans decode steps and processes their results.

    Owns the running batch; a request owns its pages until it leaves.
    """

    def __init__(
        self,
        *,
        requests: DecodeRequests,
        lock: threading.Lock,
        model: ModelFacts,
        kv: KvPages,
        max_batch_requests: int,
        proposer: Proposer | None = None,
        allowed_drafts: AllowedDrafts = lambda *_: 0,
    ) -> None:
        """Create the scheduler.

        `lock` guards `requests`, which belong to the admission; their counts are read without it. `proposer` proposes
        draft tokens for speculative decoding; None = no speculation. `allowed_drafts` returns the number of draft
        tokens that the grammar of an answer allows.
        """
        self._requests = requests
        self._lock = lock
        self._model = model
        self._max_batch = max_batch_requests
        self._batch = RunningBatch(max_batch_requests, kv)
        self.speculation: Speculation | None = None
        if proposer is not None:
            self._batch = drafting = DraftingBatch(max_batch_requests, kv)
            self.speculation = speculation_of(proposer, drafting, self._grow_ahead, allowed_drafts)
        self._cancelled = 0
        """The number of cancellations that have been handled."""
        self.gap_targets: list[float] = []
        """The maximum seconds between tokens that each running request allows, ascending; infinite = no limit."""

    def schedule(self, budget: int, bounds: StepBounds | None = None) -> TokenRows | None:
        """Launch the next step with one row for each running request, at most `budget` rows, and return the rows.

        A request has no row if its answer reaches the maximum length with a token in flight. Within `bounds`, if given,
        additional rows verify draft tokens. Before the launch, waiting requests join the batch, and each request that
        needs a page for its next row gets one; other requests may be preempted for it. Returns None if the step cannot
        be planned before the tokens of the step in flight have arrived.
        """
        if self._batch.waits_for_tokens or (self.speculation is not None and self.speculation.waits(bounds)):
            return None
        self._notice_cancelled()
        self._release_stopped()
        self._take_ready(budget)
        self._allocate_pages()
        # All running requests may have been preempted for older ready ones; nothing else would wake the loop for them.
        while not self._batch.requests and self._take_ready(budget):
            self._allocate_pages()
        return (self._batch.launch() if self.speculation is None else self.speculation.launch(bounds)) or NO_ROWS

    def apply(self, token_ids: Sequence[int | None], logprobs: Sequence[TokenLogprobs | None] = ()) -> DecodedStep:
        """Process the results of the oldest step in flight, and return the step's tokens and events.

        `token_ids` has an entry for each row; `logprobs` is empty or has one for each row.
        """
        self._notice_cancelled()
        completed = self._batch.complete(cast("Sequence[int]", token_ids))
        for row in completed.event_rows:
            scores = [logprobs[sampled_row] for sampled_row in completed.rows_of(row)] if logprobs else ()
            completed.events.append(event_or_failure(self._batch, completed, row, scores))
        if self.speculation is not None:
            self.speculation.complete(completed)
        self._release_stopped()
        return completed

    def learn(self) -> None:
        """Update the acceptance probabilities of draft tokens.

        Call it after the next step was launched, so that the device does not wait.
        """
        if self.speculation is not None:
            self.speculation.learn()

    def limit(self, max_batch_requests: int) -> None:
        """Limit the batch to `max_batch_requests`; running requests continue. May be called from any thread."""
        self._max_batch = max_batch_requests

    def running_requests(self) -> int:
        """Return the number of requests in the batch."""
        return len(self._batch)

    @property
    def idle(self) -> bool:
        """True if no request is in the batch or waits to join it."""
        return not (self.gap_targets or self._requests.ready)

    def abandon(self) -> list[tuple[str, RequestRef]]:
        """End all requests of the batch, because the engine is lost.

        Returns the requests that have rows in launched steps, as pairs of router id and request reference.
        """
        computed = {slot.request: None for _, snapshot in self._batch.in_flight_steps for slot in snapshot.slots}
        self._batch.in_flight_steps.clear()
        for request in list(self._batch.requests):
            self._leave(request)
        return [(request.reservation.router_id, request.reservation.ref) for request in computed]

    def _grow_ahead(self, request: DecodeRequest) -> bool:
        with self._lock:
            return self._requests.grow_all([request])

    def _take_ready(self, budget: int) -> bool:
        """Move ready requests into the batch up to its limit; return True if any joined."""
        # No request joins while a running one waits for a page: it would take the pages that the running one needs.
        if not self._requests.ready or self._batch.waits_for_pages:
            return False
        with self._lock:
            joining = self._requests.join(min(self._max_batch, budget) - len(self._batch))
        for request in joining:
            self._start(request)
        return bool(joining)

    def _start(self, request: DecodeRequest) -> None:
        request.event_times.append(EventTime.now(LifecycleEvent.DECODE_STARTED))
        sampling = request.reservation.sampling
        request.ending = Ending.of(request.prompt_tokens, sampling, self._model)
        if sampling.needs_history:
            # A repeated row would advance the state of a state layer twice, so such a row waits for its mask instead.
            may_wait = not self._batch.kv.state_groups
            request.history = History(request.reservation.original_prompt, request.token_ids, may_wait=may_wait)
        self._batch.join(request)
        insort(self.gap_targets, request.reservation.gap_target_s)

    def _notice_cancelled(self) -> None:
        cancelled = self._requests.cancelled
        if cancelled != self._cancelled:
            self._cancelled = cancelled
            for request in [request for request in self._batch.requests if request.cancelled]:
                self._batch.drop(request)

    def _allocate_pages(self) -> None:
        """Allocate a page to each request that needs one for its next row, preempting other requests if necessary."""
        needs_page = self._batch.without_page()
        if not needs_page:
            return
        needs_page.sort(key=age)  # the oldest first, so that no page goes to a request that is preempted next
        staying = [request for request in needs_page if request.stage is Stage.RUNNING and not request.leaving]
        # The usual case: there is a page for each of them, and none is preempted.
        with self._lock:
            given = not staying or self._requests.grow_all(staying)
        if given:
            for request in staying:
                self._batch.page_added(request)
            return
        preemptions, short = self._requests.preemptions, False
        for request in needs_page:
            if request.stage is not Stage.RUNNING or request.leaving:
                continue
            with self._lock:
                given = self._requests.grow(request, self._batch.requests)
            if given:
                self._batch.page_added(request)
            else:
                short = True
        if short or self._requests.preemptions != preemptions:
            self._follow_preemption()

    def _follow_preemption(self) -> None:
        for request in list(self._batch.requests):
            if request.stage is not Stage.RUNNING:
                self._remove(request)
            elif request.preempting:
                self._batch.stop(request)

    def _release_stopped(self) -> None:
        """Preempt or end the stopped requests that have no row in a step in flight."""
        for request in self._batch.drained():
            if request.preempting and not request.cancelled and not request.ended:
                self._remove(request)
                with self._lock:
                    self._requests.preempt(request)
            else:
                self._leave(request)

    def _leave(self, request: DecodeRequest) -> None:
        self._remove(request)
        with self._lock:
            self._requests.leave(request)

    def _remove(self, request: DecodeRequest) -> None:
        self._batch.leave(request)
        if self.speculation is not None:
            self.speculation.leave(request)
        del self.gap_targets[bisect_left(self.gap_targets, request.reservation.gap_target_s)]
