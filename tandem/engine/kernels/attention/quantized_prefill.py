"""Prefill attention over an 8-bit KV cache: the keys and values that a step's rows see are first dequantized."""

import threading
from dataclasses import replace
from math import prod
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine.config.model import ModelSpec
from tandem.engine.kernels.attention.prefill_attention import PrefillAttention
from tandem.engine.kernels.attention.triton_attention_tiles import first_seen
from tandem.engine.kernels.base import StepLayout
from tandem.engine.kernels.kv_cache import KvCache, UnequalKv, codes_of, part_stride, value_dim
from tandem.engine.kernels.layers import AttentionLayer
from tandem.protocol.ending import pages_for

_TOKENS = 32
"""Number of tokens whose keys or values a program holds at a time."""
_PROGRAMS = 2048
"""Number of programs at which a launch aims: several times as many as run concurrently, to balance the work."""
_WARPS = 4
_ROWS = tl.constexpr(32)
"""Number of rows whose context lengths a program reads at a time."""


def dequantize_pages(
    cache: KvCache, layer: int, layout: StepLayout, rows: range, window_code: int, pages: Tensor
) -> None:
    """Dequantize the keys and values of `layer` that the tokens of `rows` see, and write them to `pages` row by row.

    pages is [n, 2, kv_heads, page_tokens, head_dim] float16, bfloat16 or float32; with values of other dimensions, a
    page has the keys [kv_heads, page_tokens, head_dim], then the values [kv_heads, page_tokens, v_dim]. Each row gets
    as many consecutive pages as its whole context fills, and begins after the last page of the row before; pages beyond
    number n - 1 are not written. In the last page of a row, positions after the row's context are set to 0. Pages
    that a row's first token does not see are neither read nor written. The launch does not overlap with others.
    """
    codes = codes_of(cache)
    _, _, _, kv_heads, page_tokens, head_dim = codes.shape
    contexts, table = layout.context_lens[rows.start : rows.stop], layout.page_table[rows.start : rows.stop]
    row_programs = max(1, min(-(-table.shape[1] * page_tokens // _TOKENS), _PROGRAMS // (len(rows) * kv_heads)))
    _dequantize[(row_programs, kv_heads, len(rows))](
        codes,
        contexts,
        layout.row_starts[rows.start :],
        table,
        pages,
        len(pages),
        table.stride(0),
        codes.stride(1) * layer,
        codes.stride(0),
        part_stride(cache),
        codes.stride(3),
        pages.stride(0),
        WINDOW=window_code,
        PAGE_TOKENS=page_tokens,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim(cache),
        DIM_PADDED=triton.next_power_of_2(max(head_dim, value_dim(cache))),
        KV_HEADS=kv_heads,
        TOKENS=_TOKENS,
        num_warps=_WARPS,
    )


@triton.jit(
    do_not_specialize=["most_pages", "table_stride"],
    do_not_specialize_on_alignment=["contexts_ptr", "starts_ptr", "table_ptr"],
)
def _dequantize(
    codes_ptr,
    contexts_ptr,
    starts_ptr,
    table_ptr,
    pages_ptr,
    most_pages,
    table_stride,
    layer_offset,
    page_stride,
    part_stride,
    head_stride,
    to_stride,
    WINDOW: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Program (n, head, row) dequantizes tiles n, n + num_programs(0), … of the row's tokens."""
    head, row = tl.program_id(1), tl.program_id(2)
    context = tl.load(contexts_ptr + row)
    first_page = 0
    for first in tl.range(0, row, _ROWS):
        earlier = first + tl.arange(0, _ROWS)
        first_page += tl.sum(tl.cdiv(tl.load(contexts_ptr + earlier, mask=earlier < row, other=0), PAGE_TOKENS))
    begin = 0
    if WINDOW != 0:
        tokens = tl.load(starts_ptr + row + 1) - tl.load(starts_ptr + row)
        begin = first_seen(context - tokens + 1, WINDOW) // PAGE_TOKENS * PAGE_TOKENS
    end = tl.cdiv(context, PAGE_TOKENS) * PAGE_TOKENS
    for start in tl.range(begin + tl.program_id(0) * TOKENS, end, tl.num_programs(0) * TOKENS):
        position = start + tl.arange(0, TOKENS)
        number, within = position // PAGE_TOKENS, position % PAGE_TOKENS
        seen = position < context
        page = tl.load(table_ptr + row * table_stride + number, mask=seen, other=0).to(tl.int64)
        written = (position < end) & (first_page + number < most_pages)
        from_page = codes_ptr + layer_offset + page * page_stride + head * head_stride
        to_page = pages_ptr + (first_page + number).to(tl.int64) * to_stride
        _dequantize_part(from_page, to_page, head, within, seen, written, PAGE_TOKENS, HEAD_DIM, DIM_PADDED)
        _dequantize_part(
            from_page + part_stride, to_page + KV_HEADS * PAGE_TOKENS * HEAD_DIM, head, within, seen, written,
            PAGE_TOKENS, VALUE_DIM, DIM_PADDED,
        )  # fmt: skip


@triton.jit
def _dequantize_part(
    from_page,
    to_page,
    head,
    within,
    seen,
    written,
    PAGE_TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
):
    """Dequantize the keys, or the values, of one head: those of the tokens `within` the pages [tokens].

    `from_page` points to the head's codes, and `to_page` to the copies of all heads.
    """
    dim = tl.arange(0, DIM_PADDED)[None, :]
    wanted = dim < DIM
    scales = (from_page + PAGE_TOKENS * DIM).to(tl.pointer_type(tl.float32), bitcast=True)
    scale = tl.load(scales + within, mask=seen, other=0.0)
    held = tl.load((from_page + within * DIM)[:, None] + dim, mask=seen[:, None] & wanted, other=0.0)
    numbers = held.to(tl.float32) * scale[:, None]
    to = to_page + (head * PAGE_TOKENS + within) * DIM
    tl.store(to[:, None] + dim, numbers.to(to_page.dtype.element_ty), mask=written[:, None] & wanted)


_LEAST_TOKENS = 32768
"""Minimum capacity of the dequantized copies, in tokens: 134 MB in 16 bits for 8 key heads of 128 dimensions."""


def make_copies(model: ModelSpec, page_tokens: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate memory for the dequantized copies of one layer: [pages, 2, kv_heads, page_tokens, head_dim].

    The number of heads and their dimension, the mean of keys and values, are those of the layers with the most KV. The
    pages hold the longest context of the model, and at least `_LEAST_TOKENS` tokens.
    """
    heads, dim = max(
        ((shape.kv_heads, (shape.head_dim + shape.v_dim) // 2) for shape in model.attention_shapes), key=prod
    )
    pages = pages_for(max(model.max_context, _LEAST_TOKENS), page_tokens)
    return torch.zeros(pages, 2, heads, page_tokens, dim, dtype=dtype, device=device)


class _Part(NamedTuple):
    """Consecutive rows of a step whose copies are in memory at the same time."""

    rows: range
    layout: StepLayout
    """The layout of these rows alone, with the page numbers of the copies."""
    later: Tensor
    """[T, 1, 1] bool: True for the tokens of these rows and of the rows after them."""


class QuantizedPrefill:
    """Prefill attention that dequantizes a layer's keys and values into 16-bit copies and attends to the copies.

    The step's own tokens also attend to dequantized keys and values, so that a prompt token sees the same numbers for
    any division of the prompt into chunks. Decode attention differs: it does not round code · scale to 16 bits. If the
    copies of all rows do not fit into memory at the same time, the rows are computed in several parts. In the copies,
    positions after a row's context are 0.
    """

    def __init__(self, attention: PrefillAttention, copies: Tensor) -> None:
        """Wrap `attention`, which takes 16-bit pages; `copies` is the memory of `make_copies`, shared by all calls."""
        self._attention = attention
        self._copies = copies
        self._begun = threading.local()

    @property
    def most_pages(self) -> int:
        """Maximum number of pages of all rows in a step that a CUDA graph contains; other steps have no limit."""
        return len(self._copies)

    def begin_step(self, cache: KvCache, layout: StepLayout, first_row: int) -> None:
        """Divide the rows into parts whose copies fit into memory, and lay out the copies.

        The layout of the copies is the same for all KV groups.
        """
        if layout.group == 0:
            rows = len(layout.context_lens)
            at_once = self._rows_at_once(layout, rows - first_row)
            parts = [range(first, min(first + at_once, rows)) for first in range(first_row, rows, at_once)]
            self._begun.parts = [self._part(layout, part_rows) for part_rows in parts]

    def _rows_at_once(self, layout: StepLayout, rows: int) -> int:
        if self._copies.is_cuda and torch.cuda.is_current_stream_capturing():
            return rows  # a captured step has at most `most_pages` pages, so all its rows fit
        longest = layout.page_table.shape[1]
        # Only the device knows the contexts; the host knows bounds of them.
        if layout.max_cached is not None:
            longest = min(longest, pages_for(layout.max_cached + layout.max_row_tokens, self._copies.shape[3]))
        return max(1, len(self._copies) // longest)

    def _part(self, layout: StepLayout, rows: range) -> _Part:
        contexts = layout.context_lens[rows.start : rows.stop]
        page_tokens, width = self._copies.shape[3], layout.page_table.shape[1]
        pages = (contexts + (page_tokens - 1)) // page_tokens
        first = pages.cumsum(0, dtype=torch.int32) - pages
        number = torch.arange(width, dtype=torch.int32, device=first.device)
        part = replace(
            layout,
            row_starts=layout.row_starts[rows.start : rows.stop + 1],
            context_lens=contexts,
            page_table=(first[:, None] + number).clamp(max=len(self._copies) - 1),
        )
        token = torch.arange(len(layout.positions), dtype=torch.int32, device=first.device)
        return _Part(rows, part, (token >= layout.row_starts[rows.start])[:, None, None])

    def _pages_like(self, cache: KvCache, layers: int) -> KvCache:
        """Return the memory of the copies as pages with the heads and dimensions of `cache`.

        All `layers` layers of a page have the same memory.
        """
        heads, page_tokens, dim = cache.shape[3:]
        memory = self._copies.flatten(1)

        def view(first: int, parts: int, dim: int) -> Tensor:
            some = memory[:, first : first + parts * heads * page_tokens * dim]
            return some.view(len(some), 1, parts, heads, page_tokens, dim).expand(-1, layers, -1, -1, -1, -1)

        if not isinstance(cache, UnequalKv):
            return view(0, 2, dim)
        return UnequalKv((view(0, 1, dim), view(heads * page_tokens * dim, 1, value_dim(cache))))

    def __call__(self, q: Tensor, layer: AttentionLayer, cache: KvCache, layout: StepLayout, first_row: int) -> Tensor:
        """Compute the attention of all rows from `first_row` on."""
        out: Tensor | None = None
        for rows, part, later in self._begun.parts:
            dequantize_pages(cache, layer.index, layout, rows, layer.shape.window_code, self._copies)
            # The wrapped attention indexes the copies by layer, so every layer index has to lead to the same copies.
            copies = self._pages_like(cache, layer.index + 1)
            result = self._attention(q, layer, copies, part, 0)
            out = result if out is None else torch.where(later, result, out)
        assert out is not None
        return out
