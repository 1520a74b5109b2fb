"""From rows to tensors: one host buffer a step, which goes to the device in one piece."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.batch import StepBatch, StepRow
from engine.cache.paged_cache import PagedCache
from engine.kernels.base import StepLayout
from engine.models.config import ModelConfig
from wire.errors import Internal

Words = npt.NDArray[np.int64]
Narrow = npt.NDArray[np.int32]

_FROM_HOST = -1
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
        wide = sum(sizes.wide_room)
        narrow = words[wide:].view(np.int32)
        token_ids, slots, drawn = (
            part[:length]
            for part, length in zip(np.split(words[:wide], np.cumsum(sizes.wide_room[:-1])), sizes.wide, strict=True)
        )
        positions, sources, row_starts, contexts, table = (
            part[:length]
            for part, length in zip(np.split(narrow, np.cumsum(sizes.narrow_room[:-1])), sizes.narrow, strict=True)
        )
        shaped = table.reshape(sizes.rows, sizes.width)
        return cls(token_ids, slots, drawn, positions, sources, row_starts, contexts, shaped)


class StepPacker:
    """Checks steps and writes them into buffers; holds none itself."""

    def __init__(self, limits: StepLimits) -> None:
        self.limits = limits

    def sizes(self, batch: StepBatch) -> StepSizes:
        """What `batch` needs as it is; raises Internal for a batch that breaks the limits: its maker should have
        refused the request.
        """
        longest = self._check_rows(batch.rows)
        tokens = sum(len(row.token_ids) for row in batch.rows)
        drawn = sum(row.draw is not None for row in batch.rows)
        return StepSizes(tokens, len(batch.rows), self.limits.pages_of(longest), drawn)

    def pack(self, batch: StepBatch, sizes: StepSizes, words: Words, drawn_before: Sequence[int] = ()) -> None:
        """Fill `words` [sizes.words]. Decode steps may have more rows in `sizes` than in `batch`: the rest read and
        write nothing. `drawn_before`: for each row of the step before, which of its draws is this row's.
        """
        sections = _Sections.of(words, sizes)
        self._fill_table(sections, batch.rows)
        if len(batch.rows) <= sizes.rows == sizes.tokens:
            self._fill_single(sections, batch.rows, sizes, drawn_before)
        else:
            self._fill_ragged(sections, batch.rows, drawn_before)
        self._check_ids(sections)

    def _fill_table(self, into: _Sections, rows: Sequence[StepRow]) -> None:
        for index, row in enumerate(rows):
            used = self.limits.pages_of(row.start + len(row.token_ids))
            into.table[index, :used] = row.page_ids[:used]
            into.table[index, used:] = 0
        into.table[len(rows) :] = 0

    def _fill_single(
        self, into: _Sections, rows: Sequence[StepRow], sizes: StepSizes, drawn_before: Sequence[int]
    ) -> None:
        """Every row has one token."""
        count = len(rows)
        positions = into.positions[:count]
        positions[:] = [row.start for row in rows]
        into.positions[count:] = 0
        into.token_ids[:count] = [row.token_ids[0] for row in rows]
        into.token_ids[count:] = 0
        into.sources[:count] = [_FROM_HOST if row.source is None else drawn_before[row.source] for row in rows]
        into.sources[count:] = _FROM_HOST
        into.contexts[:count] = positions + 1
        into.contexts[count:] = 0
        into.row_starts[:] = np.arange(sizes.rows + 1)
        page, offset = np.divmod(positions, self.limits.page_tokens)
        into.slots[:count] = into.table[np.arange(count), page] * np.int64(self.limits.page_tokens) + offset
        into.slots[count:] = _NOWHERE
        drawn = [index for index, row in enumerate(rows) if row.draw is not None]
        into.drawn[: len(drawn)] = drawn
        into.drawn[len(drawn) :] = 0

    def _fill_ragged(self, into: _Sections, rows: Sequence[StepRow], drawn_before: Sequence[int]) -> None:
        start, page_tokens = 0, self.limits.page_tokens
        for index, row in enumerate(rows):
            end, context = start + len(row.token_ids), row.start + len(row.token_ids)
            here = np.arange(row.start, context)
            into.row_starts[index] = start
            into.contexts[index] = context
            into.token_ids[start:end] = row.token_ids
            into.sources[start:end] = _FROM_HOST if row.source is None else drawn_before[row.source]
            into.positions[start:end] = here
            pages = into.table[index, here // page_tokens]
            into.slots[start:end] = pages * np.int64(page_tokens) + here % page_tokens
            start = end
        into.row_starts[len(rows)] = start
        drawn = [index for index, row in enumerate(rows) if row.draw is not None]
        into.drawn[:] = into.row_starts[1:][drawn] - 1

    def _check_rows(self, rows: Sequence[StepRow]) -> int:
        """The longest context."""
        if not rows or min(len(row.token_ids) for row in rows) < 1:
            raise Internal("A step needs at least one row, and each row at least one token.")
        longest = 0
        for row in rows:
            context = row.start + len(row.token_ids)
            longest = max(longest, context)
            if row.start < 0 or len(row.page_ids) < self.limits.pages_of(context):
                raise Internal(f"A row from {row.start} to {context} brings {len(row.page_ids)} pages.")
            if row.source is not None and len(row.token_ids) != 1:
                raise Internal("A row whose token the step before draws has exactly that token.")
        if longest > self.limits.max_context:
            raise Internal(f"A row ends at position {longest}; the context is {self.limits.max_context} tokens.")
        return longest

    def _check_ids(self, sections: _Sections) -> None:
        ids, table = sections.token_ids, sections.table
        if ids.min() < 0 or ids.max() >= self.limits.vocab_size:
            raise Internal(f"A token id is outside 0 .. {self.limits.vocab_size - 1}.")
        if table.min() < 0 or table.max() >= self.limits.pages:
            raise Internal(f"A page id is outside 0 .. {self.limits.pages - 1}.")


def unpack(words: Tensor, sizes: StepSizes, batch: StepBatch) -> PackedStep:
    """Views into `words` [sizes.words] int64, on any device."""
    longest = max(len(row.token_ids) for row in batch.rows)
    context = max(row.start + len(row.token_ids) for row in batch.rows)
    single = next((i for i, row in enumerate(batch.rows) if len(row.token_ids) > 1), sizes.rows)
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
