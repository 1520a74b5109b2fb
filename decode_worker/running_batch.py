"""The running batch: the requests that have a row in the next step, and the tokens of earlier steps.

A request takes a slot when it joins and frees it when it leaves (`batch_slots.py`). Its row, token and page in a step
follow from the step's number, so no counters are updated from step to step. The step in which a request ends or needs a
page is scheduled in advance, so a step in which hundreds of requests simply continue inspects none of them.
"""

from collections import deque
from collections.abc import Collection, Sequence

import numpy as np

from decode_worker.batch_slots import BatchSlot, SlotColumns, SlotSchedule
from decode_worker.batch_snapshot import BatchSnapshot, DecodedStep, TokenBuffer
from decode_worker.request import DecodeRequest
from tandem.engine.steps.batch import TokenRows
from tandem.engine.steps.sampling_metadata import NO_TOKEN
from tandem.protocol.kv_pages import KvPages


class RunningBatch:
    """The slots of the running requests, and the steps in flight.

    Owned by the decode scheduler and used on the engine thread only. Each request owns its pages.
    """

    def __init__(self, slots: int, kv: KvPages) -> None:
        """Create a batch with `slots` slots; it grows if more requests join."""
        self.kv = kv
        self._columns = SlotColumns()
        self._tokens = TokenBuffer()
        self._free: list[int] = []
        self._slots: dict[DecodeRequest, BatchSlot] = {}
        self._unstopped = 0
        self._next_step = 0
        self.in_flight_steps: deque[tuple[int, BatchSnapshot]] = deque()
        """Launched steps whose tokens have not arrived, oldest first: the number and the snapshot of each."""
        self._snapshot: BatchSnapshot | None = None
        """The snapshot for the next step; None if requests have joined, left or moved since the last step."""
        self._last_steps = SlotSchedule()
        """For each step, the slots that have their last row in it, without those of stopped requests."""
        self._page_steps = SlotSchedule()
        """For each step, the slots that need one more page for their row in it."""
        self._without_page: list[BatchSlot] = []
        """Slots that need a page for their row in the next step."""
        self._stopped: list[BatchSlot] = []
        """Slots of stopped requests that have not left yet."""
        self._with_events: list[BatchSlot] = []
        """Slots whose next token must be sent in an event."""
        self._with_history: list[BatchSlot] = []
        """Slots of requests with penalties or a grammar; their answers must be up to date after each step."""
        self._stop_sets: dict[frozenset[int], int] = {}
        """Sets of tokens that end an answer, each with the number of requests that use it."""
        self._stop_tokens: frozenset[int] = frozenset()
        """All tokens that end the answer of any request: the union of `_stop_sets`."""
        self._grow(slots)

    def __len__(self) -> int:
        """Return the number of requests, without stopped ones."""
        return self._unstopped

    @property
    def requests(self) -> Collection[DecodeRequest]:
        """All requests, including stopped ones that are still in a step in flight."""
        return self._slots.keys()

    def join(self, request: DecodeRequest) -> None:
        """Give the request a slot.

        The caller has set its `answer`, `pages`, `ending` and, if it has penalties or a grammar, its `history`.
        """
        if not self._free:
            self._grow(max(1, len(self._columns)))
        ending, now = request.ending, self._next_step
        # The input of the first row is the newest token, at `position`. The last row samples the last possible token,
        # so its input is the token before.
        position = request.prompt_tokens + len(request.answer) - 1
        last = now + request.prompt_tokens + ending.limit - 2 - position
        slot = self._slots[request] = BatchSlot(request, self._free.pop(), now, position - now, last, now)
        request.batch = self
        self._unstopped += 1
        self._snapshot = None
        self._columns.enter(slot)
        self._last_steps.put(slot, last)
        if ending.stops:
            self._stop_sets[ending.stops] = self._stop_sets.get(ending.stops, 0) + 1
            self._stop_tokens |= ending.stops
        if request.event_times or request.reservation.sampling.logprobs is not None:
            self._with_events.append(slot)
        if request.history is not None:
            self._with_history.append(slot)
        self._copy_pages(slot)

    def page_added(self, request: DecodeRequest) -> None:
        """Copy the page that a request has got for its next row."""
        slot = self._slots[request]
        self._without_page.remove(slot)
        self._copy_pages(slot)

    def stop(self, request: DecodeRequest) -> None:
        """Plan no further rows for the request. It still gets the tokens of steps in flight."""
        slot = self._slots[request]
        if slot.stopped:
            return
        self._unstopped -= 1
        slot.stopped = True
        self._stopped.append(slot)
        if slot.last_step >= self._next_step:
            slot.last_step = self._next_step - 1
            self._last_steps.remove(slot)
            self._columns.reschedule(slot)
            self._snapshot = None

    def drop(self, request: DecodeRequest) -> None:
        """Plan no further rows for the request, and discard the tokens of its rows in flight."""
        self.stop(request)
        self.flush_tokens(request)
        self._slots[request].dropped = True

    def drained(self) -> list[DecodeRequest]:
        """Return the stopped requests that have no row in a step in flight."""
        return [slot.request for slot in self._stopped if not self.in_flight(slot.request)]

    def leave(self, request: DecodeRequest) -> None:
        """Free the slot of a request that has no row in a step in flight."""
        self.stop(request)
        self.flush_tokens(request)
        slot, stops = self._slots.pop(request), request.ending.stops
        request.batch = None
        self._columns.leave(slot)
        self._free.append(slot.index)
        self._last_steps.remove(slot)
        self._page_steps.remove(slot)
        for some in (self._stopped, self._without_page, self._with_events, self._with_history):
            if slot in some:
                some.remove(slot)
        if stops:
            self._stop_sets[stops] -= 1
            if not self._stop_sets[stops]:
                del self._stop_sets[stops]
                self._stop_tokens = frozenset().union(*self._stop_sets)

    def flush_tokens(self, request: DecodeRequest) -> None:
        """Append the tokens that have arrived to the request's `answer`."""
        self._tokens.flush(self._slots[request])

    def in_flight(self, request: DecodeRequest) -> int:
        """Return the number of launched steps with a row of the request whose tokens have not arrived."""
        slot = self._slots[request]
        return sum(slot.has_row_in(step) for step, _ in self.in_flight_steps)

    @property
    def waits_for_tokens(self) -> bool:
        """True if the next step cannot be planned yet, because a row in flight was sampled without its grammar's mask.

        Its token will be discarded, and the request's next row repeats it.
        """
        histories = (slot.request.history for slot in self._with_history)
        return bool(self.in_flight_steps) and any(history is not None and history.waiting for history in histories)

    @property
    def waits_for_pages(self) -> bool:
        """True if a request had no page for its row in the last step and still has none."""
        return bool(self._without_page)

    def without_page(self) -> list[DecodeRequest]:
        """Return the requests that have no page for their row in the next step."""
        step = self._next_step
        self._without_page += [slot for slot in self._page_steps.pop(step) if not slot.stopped]
        if not self._without_page:
            return []
        due = sorted((slot for slot in self._without_page if slot.last_step >= step), key=lambda slot: slot.index)
        return [slot.request for slot in due]

    def launch(self) -> TokenRows | None:
        """Launch the next step and return its rows, one for each running request with a page; None if there are none.

        The row's input is the request's newest token, which may still be in flight. A request has no row if its answer
        reaches the maximum length with a token in flight.
        """
        step = self._next_step
        snapshot = self._snapshot_of(step)
        if snapshot is None:
            return None
        for slot in self._without_page:
            self._skip_step(slot, step)
        before = self.in_flight_steps[-1][1] if self.in_flight_steps else None
        self.in_flight_steps.append((step, snapshot))
        self._next_step = step + 1
        # The next step has the same rows unless a request has its last row in this one, or is skipped.
        if step in self._last_steps or self._without_page:
            self._snapshot = None
        return TokenRows(len(snapshot), snapshot.context_tokens(step), lambda: snapshot.rows(step, before))

    def complete(self, token_ids: Sequence[int]) -> DecodedStep:
        """Process the sampled tokens of the oldest step in flight, one per row, and return the completed step.

        Tokens of dropped requests are discarded.
        """
        step, snapshot = self.in_flight_steps.popleft()
        tokens = np.array(token_ids, dtype=np.int64)
        waiting = self._waiting_rows(step, snapshot)
        for row, slot in waiting.items():
            # The row is repeated with the same input token, so this step adds nothing to the answer.
            tokens[row] = self._columns.newest_token[slot.index]
            slot.buffered_from = step + 1
        self._columns.newest_token[snapshot.indices] = tokens
        self._tokens.store(step, snapshot.indices, tokens, self._slots.values())
        for slot in self._with_history:
            self._tokens.flush(slot)
        for row, slot in waiting.items():
            if not slot.stopped:
                self._move(slot, -1, int(tokens[row]))
                self._snapshot = None
        over, with_events = self._rows_with_events(step, snapshot, token_ids)
        over |= waiting.keys()
        if tokens.min() == NO_TOKEN:
            with_events |= {row for row, token in enumerate(token_ids) if token == NO_TOKEN}
        with_events -= over
        _ = snapshot.owners  # copied now, while all of these requests still have their slots
        return DecodedStep(step, snapshot, token_ids, sorted(with_events), over | with_events)

    def event_sent(self, request: DecodeRequest) -> None:
        """Record that an event was sent for the request, with its lifecycle times (`event_times`).

        From now on its tokens are sent without events, together with those of the step, except a token that may end the
        answer. A request with log probabilities needs an event for every token.
        """
        slot = self._slots[request]
        if slot in self._with_events and request.reservation.sampling.logprobs is None:
            self._with_events.remove(slot)

    def _waiting_rows(self, step: int, snapshot: BatchSnapshot) -> dict[int, BatchSlot]:
        """Return the rows for which no token was sampled, because their grammar mask was not ready, with their slots.

        They are repeated in a later step. No later launched step has a row of these requests (`waits_for_tokens`).
        """
        waiting = [
            slot
            for slot in self._with_history
            if (history := slot.request.history) is not None
            and history.waiting
            and slot.has_row_in(step)
            and not slot.dropped
        ]
        return {snapshot.slots.index(slot): slot for slot in waiting}

    def _move(self, slot: BatchSlot, positions: int, newest_token: int) -> None:
        """Move the next row of a request by `positions`, because it gained more or fewer than one token in a step."""
        self._columns.newest_token[slot.index] = newest_token
        self._page_steps.remove(slot)
        # The row of each step moves forward by `positions`, so the last position is reached as many steps earlier.
        slot.position_offset += positions
        slot.last_step -= positions
        self._columns.reschedule(slot)
        self._last_steps.put(slot, slot.last_step)
        self._schedule_page(slot)
        if slot.last_step < self._next_step:
            self._snapshot = None

    def _snapshot_of(self, step: int) -> BatchSnapshot | None:
        """Return the snapshot of the requests with a row in this step, or None if there are none."""
        if self._snapshot is None or self._without_page:
            indices = np.flatnonzero(self._columns.last_step >= step)
            if self._without_page:
                indices = np.setdiff1d(indices, [slot.index for slot in self._without_page])
            if not len(indices):
                return None
            self._snapshot = BatchSnapshot(self._columns, indices)
        return self._snapshot

    def _skip_step(self, slot: BatchSlot, step: int) -> None:
        """Postpone all rows of a request that has no page by one step."""
        if slot.last_step < step:
            return
        # When the token buffer is flushed, this step must not count as a token of the request.
        if slot.first_step == step:
            slot.first_step = slot.buffered_from = step + 1
        else:
            slot.skipped_steps = (*slot.skipped_steps, step)
        slot.position_offset -= 1
        slot.last_step += 1
        self._last_steps.put(slot, slot.last_step)
        self._columns.reschedule(slot)

    def _rows_with_events(
        self, step: int, snapshot: BatchSnapshot, token_ids: Sequence[int]
    ) -> tuple[set[int], set[int]]:
        """Return the rows of dropped requests, and the other rows whose token is sent in an event."""
        over: set[int] = set()
        if self._stopped:
            over = {row for row, slot in enumerate(snapshot.slots) if slot.dropped}
        slots = [slot for slot in self._last_steps.pop(step) if slot.has_row_in(step)]
        if self._with_events:
            slots += [slot for slot in self._with_events if slot.has_row_in(step)]
        with_events = {snapshot.slots.index(slot) for slot in slots} if slots else set()
        if self._stop_tokens and not self._stop_tokens.isdisjoint(token_ids):
            drawn = enumerate(zip(token_ids, snapshot.slots, strict=True))
            with_events |= {row for row, (token, slot) in drawn if token in slot.request.ending.stops}
        return over, with_events - over

    def _copy_pages(self, slot: BatchSlot) -> None:
        self._columns.copy_pages(slot)
        self._schedule_page(slot)

    def _page_step(self, slot: BatchSlot) -> int:
        """Return the first step in which the request's row has no page."""
        return self.kv.tokens_of(slot.request.pages) - slot.position_offset

    def _schedule_page(self, slot: BatchSlot) -> None:
        step = self._page_step(slot)
        if step <= self._next_step:
            self._without_page.append(slot)
        elif step <= slot.last_step:
            self._page_steps.put(slot, step)

    def _grow(self, more: int) -> None:
        self._free.extend(reversed(self._columns.grow(more)))
        self._tokens.grow(more)
