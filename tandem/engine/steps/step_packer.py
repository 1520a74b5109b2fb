"""Packs the rows of a step into one host buffer, which is copied to the device in one transfer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from tandem.engine.cache.paged_cache import PagedCache
from tandem.engine.config.model import ModelSpec
from tandem.engine.kernels.base import StepLayout
from tandem.engine.steps.batch import RowColumns, StepBatch
from tandem.engine.steps.chunk_packer import Sections, check_chunks, fill_chunks
from tandem.engine.steps.prompt_scoring import StepPieces
from tandem.engine.steps.step_buffer import (
    OK,
    WRONG_PAGE,
    WRONG_TOKEN,
    StepLimits,
    StepSizes,
    Words,
    bounds_of,
    decode_error,
    fill_rows,
)
from tandem.protocol.errors import Internal

_NO_DRAWS = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class PackedStep:
    """The tensors of a step.

    token_ids  [T] int64
    sources    [T] int32: each token's index among the tokens that the previous step sampled; -1 = token_ids has its id
    layouts    one for each group of layers
    drawn      [D] int64: the index of the last token of each row that samples a token; None = all T tokens
    words      [sizes.words] int64, the packed step in host memory; the other tensors are views of it or of its copy on
               the device
    scoring    computes log probabilities of prompt tokens; the last indices of `drawn` are then the scored positions
    """

    token_ids: Tensor
    sources: Tensor
    layouts: tuple[StepLayout, ...]
    drawn: Tensor | None
    words: Tensor
    sizes: StepSizes
    scoring: StepPieces | None = None

    @property
    def layout(self) -> StepLayout:
        """The layout of the first group of layers; the only one if all layers are in one group."""
        return self.layouts[0]


def step_limits(spec: ModelSpec, cache: PagedCache) -> StepLimits:
    """Return the limits against which the rows of a model's steps over `cache` are checked.

    The maximum context is also bounded by the number of pages, because a longer request could never finish.
    """
    reachable = min(spec.max_context, cache.kv_pages.tokens_in(cache.pages))
    return StepLimits(spec.vocab_size, reachable, cache.pages, cache.page_tokens, cache.kv_pages.windows)


class StepPacker:
    """Checks the rows of steps and writes them into buffers, which the caller owns. The engine's thread calls it."""

    def __init__(self, limits: StepLimits) -> None:
        self.limits = limits
        self._row_limits = limits.row_limits

    def sizes(self, batch: StepBatch) -> StepSizes:
        """Return the sizes of the sections that `batch` needs.

        Raises Internal if the batch is empty, has a malformed chunk, or has a row beyond the maximum context. Rows of
        one token are checked only when they are packed. All of these errors are defects of the scheduler, which should
        have rejected the request.
        """
        singles, chunks = len(batch.tokens), batch.chunks
        if not singles and not chunks:
            raise Internal("A step needs at least one row.")
        longest = batch.tokens.columns.longest
        if chunks:
            longest = max(longest, check_chunks(chunks, self.limits))
        if longest > self.limits.max_context:
            raise Internal(f"A row ends at position {longest}; the context is {self.limits.max_context} tokens.")
        width = self.limits.pages_of(longest)
        if not chunks:
            return self.limits.sizes(singles, singles, width, singles)
        tokens = singles + sum(len(row.token_ids) for row in chunks)
        drawn = singles + sum(row.draw is not None for row in chunks)
        return self.limits.sizes(tokens, singles + len(chunks), width, drawn)

    def pack(
        self,
        batch: StepBatch,
        sizes: StepSizes,
        words: Words,
        drawn_before: Sequence[int] = (),
        chunks_at: int | None = None,
    ) -> None:
        """Write the batch into `words` [sizes.words]. Raises Internal for a malformed row.

        If `sizes` has more rows and tokens than `batch`, the rest becomes padding, which reads and writes nothing.
        `chunks_at` is the number of the first row, and of the first token, of the chunks; None = directly after the
        rows of one token or, without chunks, after all rows. `drawn_before` has, for each row of the previous step, its
        index among the rows of that step that sampled a token; empty = all rows sampled one.
        """
        if chunks_at is None:
            chunks_at = len(batch.tokens) if batch.chunks else sizes.rows
        self._fill_tokens(words, sizes, batch.tokens.columns, drawn_before, chunks_at)
        if batch.chunks or chunks_at < max(sizes.tokens, sizes.rows):
            fill_chunks(Sections.of(words, sizes), batch, chunks_at, drawn_before, self.limits)

    def _fill_tokens(
        self, words: Words, sizes: StepSizes, rows: RowColumns, drawn_before: Sequence[int], end: int
    ) -> None:
        """Write the rows of one token, which come first in every section, and padding rows up to `end`."""
        code = fill_rows(
            words,
            sizes.starts,
            rows.position_offset,
            rows.step,
            rows.token_ids,
            rows.sources,
            np.array(drawn_before, dtype=np.int64) if drawn_before else _NO_DRAWS,
            rows.slot_indices,
            rows.table,
            rows.page_counts,
            rows.adapters,
            end,
            sizes.width,
            self._row_limits,
        )
        if code != OK:
            self._refuse(rows, *decode_error(code))

    def _refuse(self, rows: RowColumns, fault: int, row: int) -> NoReturn:
        if fault == WRONG_TOKEN:
            raise self.limits.wrong_token()
        if fault == WRONG_PAGE:
            raise self.limits.wrong_page()
        start, page_count = int(rows.position_offset[row]) + rows.step, rows.page_counts[rows.slot_indices[row]]
        raise Internal(f"A row from {start} to {start + 1} brings {page_count} pages.")


def unpack(words: Tensor, sizes: StepSizes, batch: StepBatch, device: torch.device) -> PackedStep:
    """Return the packed step of `words` [sizes.words] int64, which is in host memory, with its tensors on `device`.

    The copy to the device is only launched.
    """
    tokens, chunks = batch.tokens, batch.chunks
    longest = max((len(row.token_ids) for row in chunks), default=1)
    context = tokens.columns.longest
    context = max(context, *(row.start + len(row.token_ids) for row in chunks)) if chunks else context
    single = next((i for i, row in enumerate(chunks, len(tokens)) if len(row.token_ids) > 1), sizes.rows)
    cached = max((row.start for row in chunks), default=0)
    copy = words.to(device, non_blocking=True)
    step = view_step(copy, sizes, max_row_tokens=longest, max_context=context, single_rows=single, max_cached=cached)
    return with_host_words(step, words)


def with_host_words(step: PackedStep, words: Tensor) -> PackedStep:
    """Return a packed step whose tensors are on the device, with `words`, their source in host memory."""
    sizes = step.sizes
    starts = words[sum(sizes.int64_capacity) :].view(torch.int32)[bounds_of(sizes).row_starts]
    layouts = tuple(replace(layout, host_starts=starts) for layout in step.layouts)
    return replace(step, layouts=layouts, words=words)


def view_step(
    words: Tensor,
    sizes: StepSizes,
    *,
    max_row_tokens: int,
    max_context: int,
    single_rows: int,
    max_cached: int | None = None,
) -> PackedStep:
    """Return a packed step as `unpack` does, valid for every batch within these bounds."""
    int32_start = sum(sizes.int64_capacity)
    token_ids, slots, drawn = _cut(words[:int32_start], sizes.int64_capacity, sizes.int64_sections)
    int32_words = words[int32_start:].view(torch.int32)
    positions, sources, row_starts, contexts, table, adapters, states = _cut(
        int32_words, sizes.int32_capacity, sizes.int32_sections
    )
    slots, table = slots.view(sizes.groups, -1), table.view(sizes.groups, -1)
    with_kv = [
        StepLayout(
            positions=positions,
            slots=slots[group, : sizes.tokens],
            row_starts=row_starts,
            context_lens=contexts,
            page_table=table[group, : sizes.rows * sizes.width].view(sizes.rows, sizes.width),
            max_row_tokens=max_row_tokens,
            max_context=max_context,
            single_rows=single_rows,
            max_cached=max_cached,
            group=group,
            adapters=adapters,
        )
        for group in range(sizes.groups)
    ]
    # State layers have no slots and no page table. Those of the first group say which tokens are padding.
    with_states = [
        replace(
            with_kv[0],
            group=sizes.groups + number,
            state_pages=pages[: 2 * sizes.rows].view(sizes.rows, 2),
        )
        for number, pages in enumerate(states.view(sizes.states, sizes.group_states))
    ]
    layouts = (*with_kv, *with_states)
    return PackedStep(token_ids, sources, layouts, None if sizes.drawn == sizes.tokens else drawn, words, sizes)


def _cut(tensor: Tensor, capacities: list[int], lengths: list[int]) -> list[Tensor]:
    return [part[:length] for part, length in zip(tensor.split_with_sizes(capacities), lengths, strict=True)]
