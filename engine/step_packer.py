"""From rows to tensors: one packed host buffer a step, copied to the device in one piece."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.batch import StepBatch, StepRow
from engine.kernels.base import StepLayout
from wire.errors import Internal

Words = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PackedStep:
    """A step's tensors: token_ids [T] int64; drawn [D] int64, the last tokens of rows with a draw, None = all T."""

    token_ids: Tensor
    layout: StepLayout
    drawn: Tensor | None


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What rows must respect, or memory that is not theirs would be read or written."""

    vocab_size: int
    max_context: int
    pages: int
    page_tokens: int


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The buffer's sections, in order: int64 token_ids, slots, drawn; int32 positions, row starts, contexts, table."""

    tokens: int
    rows: int
    width: int
    drawn: int

    @property
    def wide(self) -> list[int]:
        return [self.tokens, self.tokens, self.drawn]

    @property
    def narrow(self) -> list[int]:
        return [self.tokens, self.rows + 1, self.rows, self.rows * self.width]

    @property
    def words(self) -> int:
        return sum(self.wide) + -(-sum(self.narrow) // 2)


class StepPacker:
    """Packs steps into a buffer it keeps: tensors of a step are good until the next one is packed."""

    def __init__(self, limits: StepLimits, device: torch.device) -> None:
        self._limits = limits
        self._device = device
        self._host = self._allocate(4096)

    def pack(self, batch: StepBatch) -> PackedStep:
        """Raises Internal for a batch that breaks the limits: its maker should have refused the request."""
        rows = batch.rows
        lengths = [len(row.token_ids) for row in rows]
        contexts = [row.start + length for row, length in zip(rows, lengths, strict=True)]
        self._check_rows(rows, lengths, contexts)
        drawn = [index for index, row in enumerate(rows) if row.draw is not None]
        sizes = _Sizes(sum(lengths), len(rows), self._pages_of(max(contexts)), len(drawn))
        if sizes.words > len(self._host):
            self._host = self._allocate(2 * sizes.words)
        host = self._host[: sizes.words]
        self._fill(host.numpy(), sizes, rows, contexts, drawn)
        on_device = host if self._device.type == "cpu" else host.to(self._device)
        return _unpack(on_device, sizes, max(lengths), max(contexts))

    def _fill(self, host: Words, sizes: _Sizes, rows: Sequence[StepRow], contexts: list[int], drawn: list[int]) -> None:
        wide = sum(sizes.wide)
        token_ids, slots, ends = np.split(host[:wide], np.cumsum(sizes.wide[:-1]))
        narrow = host[wide:].view(np.int32)[: sum(sizes.narrow)]
        positions, row_starts, context_lens, table = np.split(narrow, np.cumsum(sizes.narrow[:-1]))
        page_table = table.reshape(sizes.rows, sizes.width)
        context_lens[:] = contexts
        page_tokens, start = self._limits.page_tokens, 0
        for index, (row, context) in enumerate(zip(rows, contexts, strict=True)):
            end, used = start + context - row.start, self._pages_of(context)
            row_starts[index] = start
            page_table[index, :used] = row.page_ids[:used]
            page_table[index, used:] = 0
            token_ids[start:end] = row.token_ids
            if end - start == 1:
                positions[start] = row.start
                slots[start] = row.page_ids[used - 1] * page_tokens + row.start % page_tokens
            else:
                here = np.arange(row.start, context)
                positions[start:end] = here
                slots[start:end] = page_table[index, here // page_tokens] * np.int64(page_tokens) + here % page_tokens
            start = end
        row_starts[sizes.rows] = start
        ends[:] = row_starts[1:][drawn] - 1
        self._check_ids(token_ids, page_table)

    def _check_rows(self, rows: Sequence[StepRow], lengths: list[int], contexts: list[int]) -> None:
        if not rows or min(lengths) < 1:
            raise Internal("A step needs at least one row, and each row at least one token.")
        if max(contexts) > self._limits.max_context:
            raise Internal(f"A row ends at position {max(contexts)}; the context is {self._limits.max_context} tokens.")
        for row, context in zip(rows, contexts, strict=True):
            if row.start < 0 or len(row.page_ids) < self._pages_of(context):
                raise Internal(f"A row from {row.start} to {context} brings {len(row.page_ids)} pages.")

    def _check_ids(self, token_ids: Words, page_table: npt.NDArray[np.int32]) -> None:
        if token_ids.min() < 0 or token_ids.max() >= self._limits.vocab_size:
            raise Internal(f"A token id is outside 0 .. {self._limits.vocab_size - 1}.")
        if page_table.min() < 0 or page_table.max() >= self._limits.pages:
            raise Internal(f"A page id is outside 0 .. {self._limits.pages - 1}.")

    def _pages_of(self, context: int) -> int:
        return -(-context // self._limits.page_tokens)

    def _allocate(self, words: int) -> Tensor:
        return torch.empty(words, dtype=torch.int64, pin_memory=self._device.type == "cuda")


def _unpack(words: Tensor, sizes: _Sizes, max_row_tokens: int, max_context: int) -> PackedStep:
    wide = sum(sizes.wide)
    token_ids, slots, drawn = words[:wide].split_with_sizes(sizes.wide)
    narrow = words[wide:].view(torch.int32)[: sum(sizes.narrow)]
    positions, row_starts, context_lens, table = narrow.split_with_sizes(sizes.narrow)
    layout = StepLayout(
        positions=positions,
        slots=slots,
        row_starts=row_starts,
        context_lens=context_lens,
        page_table=table.view(sizes.rows, sizes.width),
        max_row_tokens=max_row_tokens,
        max_context=max_context,
    )
    return PackedStep(token_ids, layout, None if sizes.drawn == sizes.tokens else drawn)
