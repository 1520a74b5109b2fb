"""Copies of 8-bit keys and values in 16 bits, for prefill attention that takes pages of one dtype."""

import triton
import triton.language as tl
from torch import Tensor

from tandem.engine.kernels.base import StepLayout
from tandem.engine.kernels.kv_cache import QuantizedKv

_TOKENS = 32
"""Tokens of which a program holds the keys or values at a time."""
_PROGRAMS = 2048
"""Programs of all rows: several times as many as run at a time, so that none waits for a few."""
_WARPS = 4
_ROWS = tl.constexpr(32)
"""Rows whose contexts a program reads together."""


def dequantize_pages(
    cache: QuantizedKv, layer: int, layout: StepLayout, rows: range, window: int | None, pages: Tensor
) -> None:
    """Writes the keys and values of `layer` that the tokens of `rows` see to `pages`, row after row.

    pages [n, 2, kv_heads, page_tokens, head_dim] float16, bfloat16 or float32. Row r gets as many pages as its context
    has, behind those of the rows before it; what does not fit is left out. Positions after a row's context are 0. Pages
    before the window of a row's first token are not read, and not written. The launch overlaps no other.
    """
    _, _, _, kv_heads, page_tokens, head_dim = cache.shape
    contexts, table = layout.context_lens[rows.start : rows.stop], layout.page_table[rows.start : rows.stop]
    codes = cache.codes
    each = max(1, min(-(-table.shape[1] * page_tokens // _TOKENS), _PROGRAMS // (len(rows) * kv_heads)))
    _dequantize[(each, kv_heads, len(rows))](
        codes,
        contexts,
        layout.row_starts[rows.start :],
        table,
        pages,
        len(pages),
        table.stride(0),
        codes.stride(1) * layer,
        codes.stride(0),
        codes.stride(2),
        codes.stride(3),
        pages.stride(0),
        WINDOW=window or 0,
        PAGE_TOKENS=page_tokens,
        HEAD_DIM=head_dim,
        DIM_PADDED=triton.next_power_of_2(head_dim),
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
    DIM_PADDED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Program (n, head, row) copies every `num_programs(0)`th tile of the row's tokens, starting with the n-th."""
    head, row = tl.program_id(1), tl.program_id(2)
    context = tl.load(contexts_ptr + row)
    first_page = 0
    for first in tl.range(0, row, _ROWS):
        other = first + tl.arange(0, _ROWS)
        first_page += tl.sum(tl.cdiv(tl.load(contexts_ptr + other, mask=other < row, other=0), PAGE_TOKENS))
    begin = 0
    if WINDOW > 0:
        tokens = tl.load(starts_ptr + row + 1) - tl.load(starts_ptr + row)
        begin = tl.maximum(context - tokens - WINDOW + 1, 0) // PAGE_TOKENS * PAGE_TOKENS
    end = tl.cdiv(context, PAGE_TOKENS) * PAGE_TOKENS
    dim = tl.arange(0, DIM_PADDED)[None, :]
    wanted = dim < HEAD_DIM
    for start in tl.range(begin + tl.program_id(0) * TOKENS, end, tl.num_programs(0) * TOKENS):
        position = start + tl.arange(0, TOKENS)
        number, within = position // PAGE_TOKENS, position % PAGE_TOKENS
        seen = position < context
        page = tl.load(table_ptr + row * table_stride + number, mask=seen, other=0).to(tl.int64)
        written = (position < end) & (first_page + number < most_pages)
        for part in tl.static_range(2):
            plane = codes_ptr + layer_offset + page * page_stride + part * part_stride + head * head_stride
            scales = (plane + PAGE_TOKENS * HEAD_DIM).to(tl.pointer_type(tl.float32), bitcast=True)
            scale = tl.load(scales + within, mask=seen, other=0.0)
            held = tl.load((plane + within * HEAD_DIM)[:, None] + dim, mask=seen[:, None] & wanted, other=0.0)
            numbers = held.to(tl.float32) * scale[:, None]
            to = pages_ptr + (first_page + number).to(tl.int64) * to_stride
            to += ((part * KV_HEADS + head) * PAGE_TOKENS + within) * HEAD_DIM
            tl.store(to[:, None] + dim, numbers.to(pages_ptr.dtype.element_ty), mask=written[:, None] & wanted)
