"""Zeroing of the values after a row's context, for attention kernels that also multiply masked positions."""

import triton
import triton.language as tl

from tandem.engine.kernels.base import StepLayout
from tandem.engine.kernels.kv_cache import KvCache, codes_of, part_stride, value_dim
from tandem.engine.kernels.triton_launch import launch_dependents, wait_for_inputs

_WARPS = 4


def clear_value_tails(cache: KvCache, layout: StepLayout, first_row: int, *, pdl: bool) -> None:
    """Zero the values after a row's context in the row's last page, in all layers, for each row from `first_row` on.

    cache [pages, layers, 2, kv_heads, page_tokens, head_dim] without codes. The keys there are not zeroed, because
    masked scores are not used.
    """
    keys = codes_of(cache)
    _, layers, _, kv_heads, page_tokens, _ = keys.shape
    contexts, table = layout.context_lens[first_row:], layout.page_table[first_row:]
    _clear[(len(contexts), layers, kv_heads)](
        keys,
        contexts,
        table,
        table.stride(0),
        keys.stride(0),
        keys.stride(1),
        part_stride(cache),
        keys.stride(3),
        PAGE=page_tokens,
        DIM=value_dim(cache),
        BLOCK=triton.next_power_of_2(page_tokens * value_dim(cache)),
        PDL=pdl,
        num_warps=_WARPS,
        launch_pdl=pdl,
    )


@triton.jit
def _clear(
    cache_ptr,
    contexts_ptr,
    table_ptr,
    table_stride,
    page_stride,
    layer_stride,
    kind_stride,
    head_stride,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row, layer, head) zeroes the values after the context in the row's last page."""
    launch_dependents(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    context = tl.load(contexts_ptr + row)
    stored = context % PAGE
    if stored > 0:
        page = tl.load(table_ptr + row * table_stride + context // PAGE).to(tl.int64)
        values = cache_ptr + page * page_stride + tl.program_id(1) * layer_stride + kind_stride
        place = tl.arange(0, BLOCK)
        unused = (place >= stored * DIM) & (place < PAGE * DIM)
        zeros = tl.zeros((BLOCK,), cache_ptr.dtype.element_ty)
        tl.store(values + tl.program_id(2) * head_stride + place, zeros, mask=unused)
