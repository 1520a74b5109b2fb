"""From rows to tensors: one host buffer a step, which goes to the device in one piece."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.batch import StepBatch, StepRow, TokenRows
from engine.cache.paged_cache import PagedCache
from engine.kernels.base import StepLayout
from engine.models.config import ModelConfig
from engine.token_rows import FROM_HOST
from wire.errors import Internal

Words = npt.NDArray[np.int64]
Narrow = npt.NDArray[np.int32]

_Array = TypeVar("_Array", Words, Narrow)

_NOWHERE = -1


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


@dataclass(frozen=True, slots=True)
class StepSizes:
    """How long each section of the buffer is, in elements.

    In order: int64 token_ids, slots, drawn; int32 positions, sources, row starts, contexts, page table. Each begins at
    a multiple of 16 bytes, as kernels are compiled once more for addresses that do not.
    """

    tokens: int
    rows: int
    width: int
    """Pages of the page table's rows."""
    drawn: int

    @property
    def wide(self) -> list[int]:
        return [self.tokens, self.tokens, self.drawn]

    @property
    def narrow(self) -> list[int]:
        return [self.tokens, self.tokens, self.rows + 1, self.rows, self.rows * self.width]

    @property
    def wide_room(self) -> list[int]:
        """Elements from each int64 section's start to the next one's."""
        return [-(-length // 2) * 2 for length in self.wide]

    @property
    def narrow_room(self) -> list[int]:
        """Elements from each int32 section's start to the next one's."""
        return [-(-length // 4) * 4 for length in self.narrow]

    @property
    def words(self) -> int:
        """Of 8 bytes, for all sections."""
        return sum(self.wide_room) + sum(self.narrow_room) // 2


@dataclass(slots=True)
class _Sections:
    """Views into one buffer."""

    token_ids: Words
    slots: Words
    drawn: Words
    positions: Narrow
    sources: Narrow
    row_starts: Narrow
    contexts: Narrow
    table: Narrow

    @classmethod
    def of(cls, words: Words, sizes: StepSizes) -> "_Sections":
        wide_room = sizes.wide_room
        narrow = words[sum(wide_room) :].view(np.int32)
        token_ids, slots, drawn = _slices(words, wide_room, sizes.wide)
        positions, sources, row_starts, contexts, table = _slices(narrow, sizes.narrow_room, sizes.narrow)
        return cls(
            token_ids, slots, drawn, positions, sources, row_starts, contexts, table.reshape(sizes.rows, sizes.width)
        )


def _slices(words: _Array, rooms: list[int], lengths: list[int]) -> list[_Array]:
    ends = itertools.accumulate(rooms)
    return [words[end - room : end - room + length] for end, room, length in zip(ends, rooms, lengths, strict=True)]


class StepPacker:
    """Checks steps and writes them into buffers; holds none itself."""

    def __init__(self, limits: StepLimits) -> None:
        self.limits = limits

    def sizes(self, batch: StepBatch) -> StepSizes:
        """What `batch` needs as it is; raises Internal for a batch that breaks the limits: its maker should have
        refused the request.
        """
        longest = max(self._check_tokens(batch.tokens), self._check_chunks(batch.chunks))
        if not len(batch):
            raise Internal("A step needs at least one row.")
        if longest > self.limits.max_context:
            raise Internal(f"A row ends at position {longest}; the context is {self.limits.max_context} tokens.")
        singles = len(batch.tokens)
        tokens = singles + sum(len(row.token_ids) for row in batch.chunks)
        drawn = singles + sum(row.draw is not None for row in batch.chunks)
        return StepSizes(tokens, len(batch), self.limits.pages_of(longest), drawn)

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
        sections = _Sections.of(words, sizes)
        singles = len(batch.tokens)
        if chunks_at is None:
            chunks_at = singles if batch.chunks else sizes.rows
        self._fill_tokens(sections, batch.tokens, drawn_before)
        _fill_single_padding(sections, singles, chunks_at)
        tokens, drawn = self._fill_chunks(sections, batch, chunks_at, drawn_before)
        _fill_empty_rows(sections, chunks_at + len(batch.chunks), tokens, drawn)
        self._check_ids(sections)

    def _fill_tokens(self, into: _Sections, rows: TokenRows, drawn_before: Sequence[int]) -> None:
        """Rows of one token each: the first of every section."""
        count, page_tokens = len(rows), self.limits.page_tokens
        each = np.arange(count)
        _fill_table(into.table[:count], rows.table)
        into.token_ids[:count] = rows.token_ids
        into.positions[:count] = rows.starts
        into.contexts[:count] = rows.starts + 1
        # The last place is for rows without a source, which is -1.
        into.sources[:count] = np.array([*drawn_before, FROM_HOST])[rows.sources] if drawn_before else rows.sources
        into.row_starts[:count] = into.drawn[:count] = each
        pages = rows.starts // page_tokens
        into.slots[:count] = (into.table[each, pages] - pages) * page_tokens + rows.starts

    def _fill_chunks(
        self, into: _Sections, batch: StepBatch, first: int, drawn_before: Sequence[int]
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

    def _check_tokens(self, rows: TokenRows) -> int:
        """The longest context."""
        if not len(rows):
            return 0
        starts = rows.starts
        bad = (starts < 0) | (starts >= rows.held * np.int64(self.limits.page_tokens))
        if bad.any():
            at = int(bad.argmax())
            raise Internal(f"A row from {starts[at]} to {starts[at] + 1} brings {rows.held[at]} pages.")
        return int(starts.max()) + 1

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

    def _check_ids(self, sections: _Sections) -> None:
        # Without their signs, what is negative is too large.
        if sections.token_ids.view(np.uint64).max() >= self.limits.vocab_size:
            raise Internal(f"A token id is outside 0 .. {self.limits.vocab_size - 1}.")
        if sections.table.view(np.uint32).max() >= self.limits.pages:
            raise Internal(f"A page id is outside 0 .. {self.limits.pages - 1}.")


def _fill_single_padding(into: _Sections, begin: int, end: int) -> None:
    """Rows `begin` to `end` - 1 have one token each, which reads and writes nothing."""
    _blank(into, slice(begin, end), slice(begin, end))
    into.row_starts[begin:end] = np.arange(begin, end)


def _fill_empty_rows(into: _Sections, rows: int, tokens: int, drawn: int) -> None:
    """Behind so many rows, tokens and draws there are rows without tokens, tokens of no row, and draws of nobody."""
    _blank(into, slice(rows, None), slice(tokens, None))
    into.row_starts[rows:] = tokens
    into.drawn[drawn:] = 0


def _blank(into: _Sections, rows: slice, tokens: slice) -> None:
    """These rows see nothing, and these tokens are stored nowhere."""
    into.table[rows] = 0
    into.contexts[rows] = 0
    into.token_ids[tokens] = into.positions[tokens] = 0
    into.sources[tokens] = FROM_HOST
    into.slots[tokens] = _NOWHERE


def _fill_table(into: Narrow, table: Narrow) -> None:
    """Rows of pages into wider or narrower ones, which hold all that is used."""
    width = min(into.shape[1], table.shape[1])
    into[:, :width] = table[:, :width]
    into[:, width:] = 0


def _drawn_as(source: int | None, drawn_before: Sequence[int]) -> int:
    if source is None:
        return FROM_HOST
    return drawn_before[source] if drawn_before else source


def unpack(words: Tensor, sizes: StepSizes, batch: StepBatch) -> PackedStep:
    """Views into `words` [sizes.words] int64, on any device."""
    tokens, chunks = batch.tokens, batch.chunks
    longest = max((len(row.token_ids) for row in chunks), default=1)
    context = int(tokens.starts.max(initial=-1)) + 1
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
