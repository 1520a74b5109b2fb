"""The device functions of decode attention: loads of a row's keys and values, attention, and the merge.

Tiles of BLOCK_TOKENS positions are counted from position 0. Where a page holds whole tiles, a tile's keys are one
contiguous range in one page; else each token's page is looked up. Page ids are read one tile ahead of their use. Scores
are in units of log2.
"""

import math

import triton
import triton.language as tl

from engine.kernels.triton_math import tanh

LOG2_E = tl.constexpr(math.log2(math.e))
"""Scores times this are in units of log2."""


@triton.jit
def first_seen(context, WINDOW: tl.constexpr):
    """Returns the first position that a row of this context sees."""
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(context - WINDOW, 0)
    return begin


@triton.jit
def tiles_of(context, WINDOW: tl.constexpr, BLOCK_TOKENS: tl.constexpr):
    """Returns the number of tiles that such a row sees."""
    return tl.cdiv(context, BLOCK_TOKENS) - first_seen(context, WINDOW) // BLOCK_TOKENS


@triton.jit
def page_of_tile(table, tile, begin, context, PAGE_TOKENS: tl.constexpr, BLOCK_TOKENS: tl.constexpr):
    """Returns the page id of a tile within one page, else the page ids [BLOCK_TOKENS] of its tokens; 0 where unseen."""
    start = tile * BLOCK_TOKENS
    if PAGE_TOKENS % BLOCK_TOKENS == 0:
        page = tl.load(table + start // PAGE_TOKENS, mask=start < context, other=0)
    else:
        position = start + tl.arange(0, BLOCK_TOKENS)
        seen = (position >= begin) & (position < context)
        page = tl.load(table + position // PAGE_TOKENS, mask=seen, other=0)
    return page


@triton.jit
def token_offsets(page, tile, page_stride, PAGE_TOKENS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, ROW: tl.constexpr):
    """Returns the tile's offset in the cache in elements: int64, of its first token or [BLOCK_TOKENS, 1] of all."""
    if PAGE_TOKENS % BLOCK_TOKENS == 0:
        offset = page.to(tl.int64) * page_stride + (tile * BLOCK_TOKENS % PAGE_TOKENS) * ROW
    else:
        within = (tile * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)) % PAGE_TOKENS
        offset = (page.to(tl.int64) * page_stride + within * ROW)[:, None]
    return offset


@triton.jit
def _fetch_into_cache(cache, address, wanted):
    """Prefetches the lines at `address` into L2, where `wanted`, without waiting.

    They stay coherent if written later.
    """
    line = tl.where(wanted, address, cache).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [line], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _dot(a, b, WIDE_DOT: tl.constexpr):
    """Returns a · b in float32. The interpreter takes no bfloat16; widening first changes no product."""
    if WIDE_DOT:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def fetch_tile(
    cache,
    keys,
    values,
    page,
    tile,
    begin,
    context,
    page_stride,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    LINES: tl.constexpr,
):
    """Prefetches a tile's keys and values into L2, without waiting."""
    token = tl.arange(0, BLOCK_TOKENS)
    line = tl.arange(0, LINES)
    spot = token_offsets(page, tile, page_stride, PAGE_TOKENS, BLOCK_TOKENS, HEAD_DIM)
    if PAGE_TOKENS % BLOCK_TOKENS == 0:
        spot += token[:, None] * HEAD_DIM
    spot += line[None, :] * (DIM_PADDED // LINES)
    position = tile * BLOCK_TOKENS + token
    wanted = ((position >= begin) & (position < context))[:, None] & (line * (DIM_PADDED // LINES) < HEAD_DIM)
    _fetch_into_cache(cache, keys + spot, wanted)
    _fetch_into_cache(cache, values + spot, wanted)


@triton.jit
def attend(
    query,
    keys,
    values,
    table,
    page,
    start,
    end,
    begin,
    context,
    page_stride,
    log2_scale,
    sinks,
    split,
    GROUP: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    WIDE_DOT: tl.constexpr,
):
    """Computes attention of `query` [GROUP_TILE, DIM_PADDED] to the tiles from `start`, whose page is `page`, to `end`.

    The first range (`split` 0) of a row includes the score of its sink, if SINKS: `sinks` points to those of the key
    head. SOFTCAP is in units of log2, 0 = none. Returns the running maximum and sum [GROUP_TILE] of its scores, and the
    weighted values [GROUP_TILE, DIM_PADDED].
    """
    token = tl.arange(0, BLOCK_TOKENS)
    dim = tl.arange(0, DIM_PADDED)
    if PAGE_TOKENS % BLOCK_TOKENS == 0:
        cells = token[:, None] * HEAD_DIM + dim[None, :]
    else:
        cells = dim[None, :]
    highest = tl.full([GROUP_TILE], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_TILE], tl.float32)
    mixed = tl.zeros([GROUP_TILE, DIM_PADDED], tl.float32)
    if SINKS:
        head = tl.arange(0, GROUP_TILE)
        if split == 0:
            highest = tl.load(sinks + head, mask=head < GROUP, other=0.0) * LOG2_E
            total += 1.0

    for tile in tl.range(start, end):
        offset = token_offsets(page, tile, page_stride, PAGE_TOKENS, BLOCK_TOKENS, HEAD_DIM)
        # The next tile's page id is loaded while this tile is computed.
        page = page_of_tile(table, tile + 1, begin, context, PAGE_TOKENS, BLOCK_TOKENS)
        position = tile * BLOCK_TOKENS + token
        seen = position < context
        if WINDOW > 0:
            seen = seen & (position >= begin)
        loaded = seen[:, None] & (dim < HEAD_DIM)[None, :]
        key = tl.load(keys + offset + cells, mask=loaded, other=0.0)
        scores = _dot(query, tl.trans(key), WIDE_DOT) * log2_scale
        if SOFTCAP > 0:
            scores = tanh(scores / SOFTCAP) * SOFTCAP
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1))
        weight = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(highest - higher)
        total = total * fade + tl.sum(weight, axis=1)
        value = tl.load(values + offset + cells, mask=loaded, other=0.0)
        mixed = mixed * fade[:, None] + _dot(weight.to(value.dtype), value, WIDE_DOT)
        highest = higher
    return highest, total, mixed


@triton.jit
def _merge(
    partials,
    partial_lse,
    count,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    MERGED_SPLITS: tl.constexpr,
):
    """Returns the softmax-weighted sum of `count` normalised partial results → [GROUP_PADDED, DIM_PADDED] float32."""
    split = tl.arange(0, MERGED_SPLITS)
    group = tl.arange(0, GROUP_PADDED)
    dim = tl.arange(0, DIM_PADDED)
    highest = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PADDED], tl.float32)
    merged = tl.zeros([GROUP_PADDED, DIM_PADDED], tl.float32)
    cell = split[:, None] * GROUP + group[None, :]
    element = cell[:, :, None] * HEAD_DIM + dim[None, None, :]
    for first in tl.range(0, count, MERGED_SPLITS):
        present = (first + split < count)[:, None] & (group < GROUP)[None, :]
        loaded = present[:, :, None] & (dim < HEAD_DIM)[None, None, :]
        values = tl.load(partials + first * GROUP * HEAD_DIM + element, mask=loaded, other=0.0, cache_modifier=".cg")
        # A padded head gets a finite weight; any number does, as it is not stored.
        absent = tl.where(group < GROUP, float("-inf"), 0.0)[None, :]
        lse = tl.load(partial_lse + first * GROUP + cell, mask=present, other=float("-inf"), cache_modifier=".cg")
        lse = tl.where(present, lse, absent)
        higher = tl.maximum(highest, tl.max(lse, axis=0))
        weight = tl.exp2(lse - higher[None, :])
        fade = tl.exp2(highest - higher)
        total = total * fade + tl.sum(weight, axis=0)
        merged = merged * fade[:, None] + tl.sum(values * weight[:, :, None], axis=0)
        highest = higher
    return merged / total[:, None]


@triton.jit
def deliver(
    highest,
    total,
    mixed,
    lane,
    split,
    active,
    first_partial,
    out,
    partials,
    partial_lse,
    counters,
    GROUP: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    MERGED_SPLITS: tl.constexpr,
):
    """Stores the result of `attend` for range number `split` of the row and key head `lane`.

    If it is the only `active` one it is the final result, else the partial result number `first_partial` + `split`; the
    last program to arrive merges them.
    """
    head = tl.arange(0, GROUP_TILE)
    dim = tl.arange(0, DIM_PADDED)
    held = (head < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    result = mixed / tl.where(total > 0.0, total, 1.0)[:, None]
    out_row = out + lane * (GROUP * HEAD_DIM)
    out_cells = head[:, None] * HEAD_DIM + dim[None, :]
    if active == 1:
        tl.store(out_row + out_cells, result.to(out.dtype.element_ty), mask=held)
    else:
        lane_partials = partials + first_partial * (GROUP * HEAD_DIM)
        lane_lse = partial_lse + first_partial * GROUP
        tl.store(lane_partials + split * (GROUP * HEAD_DIM) + out_cells, result, mask=held)
        tl.store(lane_lse + split * GROUP + head, highest + tl.log2(total), mask=head < GROUP)
        # All warps' stores come before the one thread that counts.
        tl.debug_barrier()
        arrived = tl.atomic_add(counters + lane, 1, sem="acq_rel", scope="gpu")
        if arrived == active - 1:
            merged = _merge(lane_partials, lane_lse, active, GROUP, GROUP_PADDED, HEAD_DIM, DIM_PADDED, MERGED_SPLITS)
            member = tl.arange(0, GROUP_PADDED)
            kept = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
            merged_cells = member[:, None] * HEAD_DIM + dim[None, :]
            tl.store(out_row + merged_cells, merged.to(out.dtype.element_ty), mask=kept)
            tl.store(counters + lane, 0)
