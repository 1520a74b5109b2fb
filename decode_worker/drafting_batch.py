"""A running batch whose steps may verify draft tokens, so that a request may gain several tokens in a step."""

from collections.abc import Callable, Mapping, Sequence

from decode_worker.batch_slots import BatchSlot
from decode_worker.batch_snapshot import BatchSnapshot, DecodedStep
from decode_worker.drafts import RowDrafts, StepDrafts, VerifiedRow, VerifiedStep
from decode_worker.request import DecodeRequest
from decode_worker.running_batch import RunningBatch
from tandem.cost_model.step_work import NOTHING, StepWork
from tandem.engine.speculation.proposer import Draft
from tandem.engine.steps.batch import TokenRows
from tandem.engine.steps.sampling_metadata import NO_TOKEN
from tandem.protocol.kv_pages import KvPages


class RowsWithDrafts(TokenRows):
    """The rows of a step's newest tokens, followed by a row for each draft token."""

    __slots__ = ("_newest",)

    def __init__(self, newest: TokenRows, drafts: StepDrafts, context_tokens: int) -> None:
        """Create the rows; `context_tokens` is the number of tokens whose KV the rows of draft tokens read, summed."""
        super().__init__(
            len(newest) + len(drafts), newest.context_tokens + context_tokens, lambda: drafts.extend(newest.columns)
        )
        self._newest = newest

    @property
    def newest(self) -> TokenRows:
        """The rows of the newest tokens."""
        return self._newest


class DraftingBatch(RunningBatch):
    """A running batch that can launch steps with draft tokens. Used on the engine thread only."""

    def __init__(self, slots: int, kv: KvPages) -> None:
        """Create a batch with `slots` slots; it grows if more requests join."""
        super().__init__(slots, kv)
        self._drafts: StepDrafts | None = None
        """The draft tokens of the step in flight, if it has any; no other step is in flight then."""
        self.kv_read_once = False
        """True if attention reads a request's KV once for all its rows, also if the request has draft tokens."""

    @property
    def verifies(self) -> bool:
        """True if a step in flight verifies draft tokens.

        The positions of the next step then depend on the number of accepted draft tokens.
        """
        return self._drafts is not None

    def next_rows(self) -> tuple[Sequence[DecodeRequest], StepWork]:
        """Return the requests with a row in the next step, and the step's work if it has no draft tokens."""
        snapshot = self._snapshot_of(self._next_step)
        if self._without_page:
            self._snapshot = None  # these requests may get a page before the step is launched
        if snapshot is None:
            return (), NOTHING
        context = snapshot.context_tokens(self._next_step)
        work = StepWork(decode_rows=len(snapshot), decode_context_tokens=context)
        return [slot.request for slot in snapshot.slots], work

    def rows_left(self, request: DecodeRequest) -> int:
        """Return the maximum number of further rows until the request's answer reaches its maximum length."""
        return max(0, self._slots[request].last_step + 1 - self._next_step)

    def next_position(self, request: DecodeRequest) -> int:
        """Return the position of the request's row in the next step."""
        return self._slots[request].position_offset + self._next_step

    def verifiable(self, request: DecodeRequest, drafts: int) -> int:
        """Return the maximum number of draft tokens, at most `drafts`, that a step can verify if there are pages.

        In a model with state layers a step writes the state of a request to one page, so its draft tokens end with the
        page of the newest token.
        """
        if not self.kv.state_groups:
            return drafts
        page = self.kv.page_tokens
        return min(drafts, page - 1 - self.next_position(request) % page)

    def positions_left(self, request: DecodeRequest) -> int:
        """Return the number of positions after the next row's position for which the request has pages."""
        return max(0, self._page_step(self._slots[request]) - self._next_step - 1)

    def grow_ahead(self, request: DecodeRequest, grow: Callable[[DecodeRequest], bool]) -> bool:
        """Call `grow` to give the request one more page in advance, and return its result."""
        if not grow(request):
            return False
        slot = self._slots[request]
        self._page_steps.remove(slot)
        self._copy_pages(slot)
        return True

    def launch(self, drafts: Mapping[DecodeRequest, Draft] | None = None) -> TokenRows | None:
        """Launch the next step and return its rows, or None if there are none.

        With `drafts`, additional rows verify the draft tokens. Draft tokens are allowed only while no step is in
        flight. Each request of `drafts` must have a row in the step, pages for the positions of its draft tokens, and
        further rows (`rows_left`) for all of them.
        """
        snapshot = self._snapshot_of(self._next_step) if drafts else None
        rows = super().launch()
        if rows is None or snapshot is None or not drafts:
            return rows
        self._drafts = step_drafts = self._step_drafts(snapshot, drafts)
        if self.kv_read_once:
            return RowsWithDrafts(rows, step_drafts, 0)
        starts = self._columns.position_offset[snapshot.indices[step_drafts.base_rows]] + step_drafts.distances
        context = int(starts.sum()) + len(step_drafts) * self._next_step
        return RowsWithDrafts(rows, step_drafts, context)

    def complete(self, token_ids: Sequence[int]) -> DecodedStep:
        """Process the sampled tokens of the oldest step in flight, and accept draft tokens.

        The draft tokens of a request are accepted up to the first that differs from the token sampled in its place, and
        at most up to the end of the answer.
        """
        drafts, self._drafts = self._drafts, None
        if drafts is None:
            return super().complete(token_ids)
        step = super().complete(token_ids[: len(token_ids) - len(drafts)])
        verified, with_events, moved, slots = {}, set(step.event_rows), False, step.snapshot.slots
        without_tokens = step.excluded_rows - with_events
        for row_drafts, run in drafts.runs(token_ids):
            row = row_drafts.row
            slot = slots[row]
            if row in without_tokens:
                continue
            first_index = slot.position_offset + step.step + 1 - slot.request.prompt_tokens
            tokens, ends = slot.request.ending.cut(run, first_index)
            verified[row] = VerifiedRow(row_drafts, tokens)
            if ends or tokens[-1] == NO_TOKEN:
                with_events.add(row)
            self._append(slot, step.step, tokens)
            if len(tokens) > 1 and not slot.stopped:
                self._move(slot, len(tokens) - 1, tokens[-1])
                moved = True
        if moved and self._snapshot is not None:
            self._snapshot = self._snapshot.moved()
        return VerifiedStep(
            step.step,
            step.snapshot,
            step.token_ids,
            sorted(with_events),
            step.excluded_rows | with_events,
            verified=verified,
        )

    def _step_drafts(self, snapshot: BatchSnapshot, drafts: Mapping[DecodeRequest, Draft]) -> StepDrafts:
        first, row_drafts = len(snapshot), []
        for row, slot in enumerate(snapshot.slots):
            draft = drafts.get(slot.request)
            if draft is not None:
                row_drafts.append(RowDrafts(row, draft.token_ids, draft.source, first))
                first += len(draft.token_ids)
        return StepDrafts(row_drafts)

    def _append(self, slot: BatchSlot, step: int, tokens: Sequence[int]) -> None:
        """Append a request's tokens of the completed step to its answer.

        The first of these tokens is in the token buffer too.
        """
        if slot.buffered_from == step:
            slot.request.answer.extend(tokens)
            slot.buffered_from = step + 1
        else:
            self._tokens.flush(slot)
            slot.request.answer.extend(tokens[1:])
