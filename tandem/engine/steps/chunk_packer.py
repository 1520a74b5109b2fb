"""Packs rows of several tokens (chunks): checks them, and writes them into the step's buffer."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tandem.engine.steps.batch import FROM_HOST, StepBatch, StepRow
from tandem.engine.steps.step_buffer import Narrow, StepLimits, StepSizes, Words, bounds_of
from tandem.protocol.errors import Internal

_NOWHERE = -1


@dataclass(slots=True)
class Sections:
    """The sections of a step's buffer (`StepSizes`) as NumPy views."""

    token_ids: Words
    slots: Words
    """[groups, tokens]: the slot in the KV cache where each token's KV is stored; -1 = nowhere."""
    drawn: Words
    positions: Narrow
    sources: Narrow
    row_starts: Narrow
    contexts: Narrow
    table: Narrow
    """[groups, rows, width]: the page ids of each row."""
    adapters: Narrow
    states: Narrow
    """[groups of state layers, rows, 2]: the pages from which and to which each row's states are read and written."""

    @classmethod
    def of(cls, words: Words, sizes: StepSizes) -> "Sections":
        """Return the sections of `words`, a buffer with the layout of `sizes`, as views."""
        at = bounds_of(sizes)
        int32_words = words[at.int32_start :].view(np.int32)
        return cls(
            words[at.token_ids],
            words[at.slots].reshape(sizes.groups, -1)[:, : sizes.tokens],
            words[at.drawn],
            int32_words[at.positions],
            int32_words[at.sources],
            int32_words[at.row_starts],
            int32_words[at.contexts],
            int32_words[at.table]
            .reshape(sizes.groups, -1)[:, : sizes.rows * sizes.width]
            .reshape(sizes.groups, sizes.rows, sizes.width),
            int32_words[at.adapters],
            int32_words[at.states]
            .reshape(sizes.states, sizes.group_states)[:, : 2 * sizes.rows]
            .reshape(sizes.states, sizes.rows, 2),
        )


def check_chunks(rows: Sequence[StepRow], limits: StepLimits) -> int:
    """Return the maximum context length of the rows, in tokens. Raises Internal for a malformed row."""
    longest = 0
    for row in rows:
        if not row.token_ids:
            raise Internal("A step needs at least one token in each row.")
        context = row.start + len(row.token_ids)
        longest = max(longest, context)
        if row.start < 0 or len(row.page_ids) < limits.groups * limits.pages_of(context):
            raise Internal(f"A row from {row.start} to {context} brings {len(row.page_ids)} pages.")
        if row.source is not None and len(row.token_ids) != 1:
            raise Internal("A row whose token the step before draws has exactly that token.")
    return longest


def fill_chunks(into: Sections, batch: StepBatch, first: int, drawn_before: Sequence[int], limits: StepLimits) -> None:
    """Write the chunks of `batch` into the buffer, and padding after them.

    The chunks start at row and token number `first`. `drawn_before` is that of `StepPacker.pack`. Raises Internal if a
    token id or page id is out of range.
    """
    tokens, drawn = _fill_rows(into, batch, first, drawn_before, limits)
    _fill_empty_rows(into, first + len(batch.chunks), tokens, drawn)
    _check_ids(into.token_ids[first:], into.table[:, first:], limits)


def _fill_rows(
    into: Sections, batch: StepBatch, first: int, drawn_before: Sequence[int], limits: StepLimits
) -> tuple[int, int]:
    """Write the chunks; return the numbers of tokens and of sampling rows so far, including rows of one token."""
    page_tokens, singles = limits.page_tokens, len(batch.tokens)
    start = first
    for index, row in enumerate(batch.chunks, first):
        end, context = start + len(row.token_ids), row.start + len(row.token_ids)
        here = np.arange(row.start, context)
        into.row_starts[index] = start
        into.contexts[index] = context
        into.token_ids[start:end] = row.token_ids
        into.sources[start:end] = _drawn_as(row.source, drawn_before)
        into.positions[start:end] = here
        into.adapters[start:end] = row.adapter
        _fill_table(into.table[:, index], into.states[:, index], row, limits)
        pages = into.table[:, index, here // page_tokens]
        into.slots[:, start:end] = pages * np.int64(page_tokens) + here % page_tokens
        start = end
    # Row r has the tokens from row_starts[r] to row_starts[r + 1], so one more entry ends the last row.
    into.row_starts[first + len(batch.chunks)] = start
    drawn = [index for index, row in enumerate(batch.chunks, first) if row.draw is not None]
    into.drawn[singles : singles + len(drawn)] = into.row_starts[1:][drawn] - 1
    return start, singles + len(drawn)


def _fill_table(table: Narrow, states: Narrow, row: StepRow, limits: StepLimits) -> None:
    """Write the page ids of a row into `table` [groups, width], and those of its states into `states` [groups, 2]."""
    groups, used = limits.groups, limits.pages_of(row.start + len(row.token_ids))
    pages = np.reshape(row.page_ids[: used * groups], (used, groups)).T
    table[:, :used] = pages[: len(table)]
    table[:, used:] = 0
    states[:, 0] = pages[len(table) :, (row.start - 1) // limits.page_tokens] if row.start else _NOWHERE
    states[:, 1] = pages[len(table) :, used - 1]
    # A row that reads no state begins with zeros, so only the first row of a request may read none.
    if states[:, 0 if row.start else 1 :].view(np.uint32).max(initial=0) >= limits.pages:
        raise limits.wrong_page()
    # Entries before the window are FREED, which is not a page id, so they repeat the first page in the window.
    for group in range(len(table)):
        seen = limits.first_page(group, row.start)
        table[group, :seen] = table[group, seen]


def _fill_empty_rows(into: Sections, rows: int, tokens: int, drawn: int) -> None:
    """Fill the rest of the buffer with padding, which reads and stores nothing.

    `rows`, `tokens` and `drawn` are the numbers of rows, tokens and sampling rows that are filled already.
    """
    into.table[:, rows:] = 0
    into.states[:, rows:] = _NOWHERE
    into.contexts[rows:] = 0
    into.token_ids[tokens:] = into.positions[tokens:] = into.adapters[tokens:] = 0
    into.sources[tokens:] = FROM_HOST
    into.slots[:, tokens:] = _NOWHERE
    into.row_starts[rows:] = tokens
    into.drawn[drawn:] = 0


def _check_ids(token_ids: Words, table: Narrow, limits: StepLimits) -> None:
    # Viewed as unsigned, a negative number is too large as well, so one comparison checks both bounds.
    if token_ids.view(np.uint64).max(initial=0) >= limits.vocab_size:
        raise limits.wrong_token()
    if table.view(np.uint32).max(initial=0) >= limits.pages:
        raise limits.wrong_page()


def _drawn_as(source: int | None, drawn_before: Sequence[int]) -> int:
    if source is None:
        return FROM_HOST
    return drawn_before[source] if drawn_before else source
