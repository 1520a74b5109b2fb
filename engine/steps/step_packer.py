"""From rows to tensors: one host buffer a step, which goes to the device in one piece."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from engine.cache.paged_cache import PagedCache
from engine.config.model import ModelConfig
from engine.kernels.base import StepLayout
from engine.steps.batch import FROM_HOST, RowColumns, StepBatch, StepRow
from engine.steps.step_buffer import (
    FINE,
    WRONG_PAGE,
    WRONG_TOKEN,
    Narrow,
    Sections,
    StepSizes,
    Words,
    fault_of,
    fill_rows,
)
from wire.errors import Internal

_NOWHERE = -1
_NO_DRAWS = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class PackedStep:
    """A step's tensors: token_ids [T] int64; drawn [D] int64, the last tokens of rows with a draw, None = all T.

    `sources` [T] int32: the draw of the step before whose token this is, -1 = the id in token_ids counts.
    """

    token_ids: Tensor
    sources: Tensor
    layout: StepLayout
    drawn: Tensor | None


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What rows must respect, or memory that is not theirs would be read or written."""

    vocab_size: int
    max_context: int
    pages: int
    page_tokens: int

    def pages_of(self, context: int) -> int:
        """Pages that `context` tokens fill."""
        return -(-context // self.page_tokens)


def step_limits(config: ModelConfig, cache: PagedCache) -> StepLimits:
    """Of a model over a cache: a request that outgrows the whole pool could never finish."""
    reachable = min(config.max_context, cache.pages * cache.page_tokens)
    return StepLimits(config.vocab_size, reachable, cache.pages, cache.page_tokens)


class StepPacker:
    """Checks steps and writes them into buffers; holds none itself."""

    def __init__(self, limits: StepLimits) -> None:
        self.limits = limits
        self._row_limits = np.array([limits.page_tokens, limits.vocab_size, limits.pages])

    def sizes(self, batch: StepBatch) -> StepSizes:
        """What `batch` needs as it is; raises Internal for one that is empty, too long, or malformed in a chunk. What
        rows of one token bring is checked as they are packed. Either way its maker should have refused the request.
        """
        singles, chunks = len(batch.tokens), batch.chunks
        if not singles and not chunks:
            raise Internal("A step needs at least one row.")
        longest = batch.tokens.columns.longest
        if chunks:
            longest = max(longest, self._check_chunks(chunks))
        if longest > self.limits.max_context:
            raise Internal(f"A row ends at position {longest}; the context is {self.limits.max_context} tokens.")
        width = self.limits.pages_of(longest)
        if not chunks:
            return StepSizes(singles, singles, width, singles)
        tokens = singles + sum(len(row.token_ids) for row in chunks)
        drawn = singles + sum(row.draw is not None for row in chunks)
        return StepSizes(tokens, singles + len(chunks), width, drawn)

    def pack(
        self,
        batch: StepBatch,
        sizes: StepSizes,
        words: Words,
        drawn_before: Sequence[int] = (),
        chunks_at: int | None = None,
    ) -> None:
        """Fill `words` [sizes.words]. `sizes` may have more rows and tokens than `batch`: the rest read and write
        nothing. The chunks' rows and tokens begin at number `chunks_at`, None = behind the rows of one token: without
        chunks those are all rows.
        `drawn_before`: for each row of the step before, which of its draws is this row's; empty if each row's is its
        own.
        """
        if chunks_at is None:
            chunks_at = len(batch.tokens) if batch.chunks else sizes.rows
        self._fill_tokens(words, sizes, batch.tokens.columns, drawn_before, chunks_at)
        if batch.chunks or chunks_at < max(sizes.tokens, sizes.rows):
            sections = Sections.of(words, sizes)
            tokens, drawn = self._fill_chunks(sections, batch, chunks_at, drawn_before)
            _fill_empty_rows(sections, chunks_at + len(batch.chunks), tokens, drawn)
            self._check_ids(sections.token_ids[chunks_at:], sections.table[chunks_at:])

    def _fill_tokens(
        self, words: Words, sizes: StepSizes, rows: RowColumns, drawn_before: Sequence[int], end: int
    ) -> None:
        """Rows of one token each, the first of every section, and up to `end` such rows of nothing."""
        found = fill_rows(
            words,
            sizes.starts,
            rows.shift,
            rows.number,
            rows.token_ids,
            rows.sources,
            np.array(drawn_before, dtype=np.int64) if drawn_before else _NO_DRAWS,
            rows.places,
            rows.table,
            rows.held,
            end,
            sizes.width,
            self._row_limits,
        )
        if found != FINE:
            self._refuse(rows, *fault_of(found))

    def _fill_chunks(
        self, into: Sections, batch: StepBatch, first: int, drawn_before: Sequence[int]
    ) -> tuple[int, int]:
        """From row and token `first` on those of several tokens → the end of all rows' tokens, and of their draws."""
        page_tokens, singles = self.limits.page_tokens, len(batch.tokens)
        start = first
        for index, row in enumerate(batch.chunks, first):
            end, context = start + len(row.token_ids), row.start + len(row.token_ids)
            used = self.limits.pages_of(context)
            into.table[index, :used] = row.page_ids[:used]
            into.table[index, used:] = 0
            here = np.arange(row.start, context)
            into.row_starts[index] = start
            into.contexts[index] = context
            into.token_ids[start:end] = row.token_ids
            into.sources[start:end] = _drawn_as(row.source, drawn_before)
            into.positions[start:end] = here
            pages = into.table[index, here // page_tokens]
            into.slots[start:end] = pages * np.int64(page_tokens) + here % page_tokens
            start = end
        into.row_starts[first + len(batch.chunks)] = start
        drawn = [index for index, row in enumerate(batch.chunks, first) if row.draw is not None]
        into.drawn[singles : singles + len(drawn)] = into.row_starts[1:][drawn] - 1
        return start, singles + len(drawn)

    def _refuse(self, rows: RowColumns, fault: int, row: int) -> NoReturn:
        if fault == WRONG_TOKEN:
            raise self._wrong_token()
        if fault == WRONG_PAGE:
            raise self._wrong_page()
        start, held = int(rows.shift[row]) + rows.number, rows.held[rows.places[row]]
        raise Internal(f"A row from {start} to {start + 1} brings {held} pages.")

    def _check_chunks(self, rows: Sequence[StepRow]) -> int:
        """The longest context."""
        longest = 0
        for row in rows:
            if not row.token_ids:
                raise Internal("A step needs at least one token in each row.")
            context = row.start + len(row.token_ids)
            longest = max(longest, context)
            if row.start < 0 or len(row.page_ids) < self.limits.pages_of(context):
                raise Internal(f"A row from {row.start} to {context} brings {len(row.page_ids)} pages.")
            if row.source is not None and len(row.token_ids) != 1:
                raise Internal("A row whose token the step before draws has exactly that token.")
        return longest

    def _check_ids(self, token_ids: Words, table: Narrow) -> None:
        # Without their signs, what is negative is too large.
        if token_ids.view(np.uint64).max(initial=0) >= self.limits.vocab_size:
            raise self._wrong_token()
        if table.view(np.uint32).max(initial=0) >= self.limits.pages:
            raise self._wrong_page()

    def _wrong_token(self) -> Internal:
        return Internal(f"A token id is outside 0 .. {self.limits.vocab_size - 1}.")

    def _wrong_page(self) -> Internal:
        return Internal(f"A page id is outside 0 .. {self.limits.pages - 1}.")


def _fill_empty_rows(into: Sections, rows: int, tokens: int, drawn: int) -> None:
    """Behind so many rows, tokens and draws there are rows without tokens, tokens of no row, and draws of nobody: they
    see nothing, and are stored nowhere.
    """
    into.table[rows:] = 0
    into.contexts[rows:] = 0
    into.token_ids[tokens:] = into.positions[tokens:] = 0
    into.sources[tokens:] = FROM_HOST
    into.slots[tokens:] = _NOWHERE
    into.row_starts[rows:] = tokens
    into.drawn[drawn:] = 0


def _drawn_as(source: int | None, drawn_before: Sequence[int]) -> int:
    if source is None:
        return FROM_HOST
    return drawn_before[source] if drawn_before else source


def unpack(words: Tensor, sizes: StepSizes, batch: StepBatch) -> PackedStep:
    """Views into `words` [sizes.words] int64, on any device."""
    tokens, chunks = batch.tokens, batch.chunks
    longest = max((len(row.token_ids) for row in chunks), default=1)
    context = tokens.columns.longest
    context = max(context, *(row.start + len(row.token_ids) for row in chunks)) if chunks else context
    single = next((i for i, row in enumerate(chunks, len(tokens)) if len(row.token_ids) > 1), sizes.rows)
    return view_step(words, sizes, max_row_tokens=longest, max_context=context, single_rows=single)


def view_step(
    words: Tensor, sizes: StepSizes, *, max_row_tokens: int, max_context: int, single_rows: int
) -> PackedStep:
    """As `unpack`, for any batch of these bounds."""
    wide = sum(sizes.wide_room)
    token_ids, slots, drawn = _cut(words[:wide], sizes.wide_room, sizes.wide)
    narrow = words[wide:].view(torch.int32)
    positions, sources, row_starts, contexts, table = _cut(narrow, sizes.narrow_room, sizes.narrow)
    layout = StepLayout(
        positions=positions,
        slots=slots,
        row_starts=row_starts,
        context_lens=contexts,
        page_table=table.view(sizes.rows, sizes.width),
        max_row_tokens=max_row_tokens,
        max_context=max_context,
        single_rows=single_rows,
    )
    return PackedStep(token_ids, sources, layout, None if sizes.drawn == sizes.tokens else drawn)


def _cut(tensor: Tensor, rooms: list[int], lengths: list[int]) -> list[Tensor]:
    return [part[:length] for part, length in zip(tensor.split_with_sizes(rooms), lengths, strict=True)]
