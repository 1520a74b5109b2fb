"""The device functions of decode attention: loads of a row's keys and values, and attention.

Tiles of BLOCK_TOKENS positions are counted from position 0. If a page holds whole tiles, the keys of a tile are one
contiguous range in one page; else the page of each token is looked up. Page ids are read one tile ahead of their use.
Scores are in units of log2.
"""

import math

import triton
import triton.language as tl

from tandem.engine.kernels.triton_math import tanh

LOG2_E = tl.constexpr(math.log2(math.e))
"""The factor that converts natural logarithms to binary ones; scores are multiplied with it."""


@triton.jit
def first_seen(context, WINDOW: tl.constexpr):
    """Return the first position that a row with this context sees; WINDOW is `AttentionShape.window_code`."""
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(context - WINDOW, 0)
    if WINDOW < 0:
        begin = tl.maximum(context - 1, 0) // -WINDOW * -WINDOW
    return begin


@triton.jit
def page_of_tile(table, tile, begin, context, PAGE_TOKENS: tl.constexpr, BLOCK_TOKENS: tl.constexpr):
    """Return the page id of a tile, or the page ids of its tokens [BLOCK_TOKENS] if a page does not hold whole tiles.

    The id is 0 where no position is seen.
    """
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
    """Return the offset of a tile's first token in the cache, or those of all tokens if pages do not hold whole tiles.

    Offsets are int64, in elements: a scalar, or [BLOCK_TOKENS, 1].
    """
    if PAGE_TOKENS % BLOCK_TOKENS == 0:
        offset = page.to(tl.int64) * page_stride + (tile * BLOCK_TOKENS % PAGE_TOKENS) * ROW
    else:
        within = (tile * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)) % PAGE_TOKENS
        offset = (page.to(tl.int64) * page_stride + within * ROW)[:, None]
    return offset


@triton.jit
def heads_of(SIZE: tl.constexpr, GROUP_PADDED: tl.constexpr, TOKENS: tl.constexpr):
    """Return the head [SIZE] of each query of a tile, counted among the query heads of the tile's key head.

    A tile of TOKENS tokens has these heads once per token, padded to GROUP_PADDED heads.
    """
    head = tl.arange(0, SIZE)
    if TOKENS > 1:
        head = head % GROUP_PADDED
    return head


@triton.jit
def group_of(
    row, groups, context_lens, GROUP_TILE: tl.constexpr, GROUP_PADDED: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    """Return the rows and contexts of group number `row`.

    The results are, in this order: the group's first row, its number of rows, the context of its first row, the context
    of its last row, the context of each query [GROUP_TILE], and the row of each query [GROUP_TILE]. Queries that belong
    to no row have the last row's context. See `tandem.engine.kernels.base.DraftGroups`. If TOKENS is 1, each row is a
    group, and all results are scalars.
    """
    if TOKENS == 1:
        count = 1
        first = row
        rows = row
        shortest = tl.load(context_lens + row)
        longest = shortest
        contexts = shortest
    else:
        first = tl.load(groups + 3 * row)
        follow = tl.load(groups + 3 * row + 1)
        count = tl.load(groups + 3 * row + 2)
        shortest = tl.load(context_lens + first, mask=count > 0, other=0)
        more = tl.maximum(count - 1, 0)
        longest = shortest + more
        token = tl.arange(0, GROUP_TILE) // GROUP_PADDED
        rows = tl.where(token == 0, first, follow + token - 1)
        contexts = shortest + tl.minimum(token, more)
    return first, count, shortest, longest, contexts, rows


@triton.jit
def held_queries(count, SIZE: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr, TOKENS: tl.constexpr):
    """Return a mask [SIZE] of the queries of a tile: True for queries that exist, False for padding.

    A query is padding if its head is beyond the GROUP query heads of the KV head or, if TOKENS > 1, if its token is
    beyond the group's `count` rows.
    """
    held = heads_of(SIZE, GROUP_PADDED, TOKENS) < GROUP
    if TOKENS > 1:
        held = held & (tl.arange(0, SIZE) // GROUP_PADDED < count)
    return held


@triton.jit
def is_seen(position, seen, contexts, WINDOW: tl.constexpr, TOKENS: tl.constexpr):
    """Return a mask [1 or queries, tokens] of the positions that each query sees.

    `seen` is the mask of the positions that some query of the tile sees.
    """
    visible = seen[None, :]
    if TOKENS > 1:
        visible = visible & (position[None, :] < contexts[:, None])
        if WINDOW > 0:
            visible = visible & (position[None, :] >= (contexts - WINDOW)[:, None])
        if WINDOW < 0:
            visible = visible & (position[None, :] >= first_seen(contexts, WINDOW)[:, None])
    return visible


@triton.jit
def finite(highest, TOKENS: tl.constexpr):
    """Return the running maxima, with 0 instead of -inf, so that they can be subtracted from scores.

    A maximum is -inf if the query has seen no position yet. That is possible only in groups of several tokens.
    """
    if TOKENS > 1:
        highest = tl.where(highest == float("-inf"), 0.0, highest)
    return highest


@triton.jit
def _fetch_into_cache(cache, address, wanted):
    """Prefetch the cache lines at `address` into L2 where the mask `wanted` is True, without waiting.

    The prefetched lines stay coherent if a kernel writes them later.
    """
    line = tl.where(wanted, address, cache).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [line], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _dot(a, b, WIDE_DOT: tl.constexpr):
    """Return a · b in float32.

    WIDE_DOT is for Triton's interpreter, which cannot multiply bfloat16: the operands are first converted to float32,
    which does not change the products.
    """
    if WIDE_DOT:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def fetch_tile(
    cache,
    plane,
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
    """Prefetch a tile's keys or values, whose head begins at `plane` in page 0, into L2, without waiting."""
    token = tl.arange(0, BLOCK_TOKENS)
    line = tl.arange(0, LINES)
    spot = token_offsets(page, tile, page_stride, PAGE_TOKENS, BLOCK_TOKENS, HEAD_DIM)
    if PAGE_TOKENS % BLOCK_TOKENS == 0:
        spot += token[:, None] * HEAD_DIM
    spot += line[None, :] * (DIM_PADDED // LINES)
    position = tile * BLOCK_TOKENS + token
    wanted = ((position >= begin) & (position < context))[:, None] & (line * (DIM_PADDED // LINES) < HEAD_DIM)
    _fetch_into_cache(cache, plane + spot, wanted)


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
    contexts,
    GROUP: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDE_DOT: tl.constexpr,
):
    """Compute attention of `query` [GROUP_TILE, DIM_PADDED] to the tiles from `start`, whose page is `page`, to `end`.

    Positions from `begin` to `context` are loaded; with several TOKENS each query sees those up to its own context in
    `contexts`. If SINKS, `sinks` points to the sinks of the key head, whose scores the first range (`split` 0) of a row
    includes. SOFTCAP is in units of log2, 0 = none.

    Returns the running maximum and sum [GROUP_TILE] of the scores, and the weighted values [GROUP_TILE,
    VALUE_PADDED].
    """
    token = tl.arange(0, BLOCK_TOKENS)
    dim = tl.arange(0, DIM_PADDED)
    value_dim = tl.arange(0, VALUE_PADDED)
    if PAGE_TOKENS % BLOCK_TOKENS == 0:
        cells = token[:, None] * HEAD_DIM + dim[None, :]
        value_cells = token[:, None] * VALUE_DIM + value_dim[None, :]
    else:
        cells = dim[None, :]
        value_cells = value_dim[None, :]
    highest = tl.full([GROUP_TILE], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_TILE], tl.float32)
    mixed = tl.zeros([GROUP_TILE, VALUE_PADDED], tl.float32)
    if SINKS:
        head = heads_of(GROUP_TILE, GROUP_PADDED, TOKENS)
        if split == 0:
            highest = tl.load(sinks + head, mask=head < GROUP, other=0.0) * LOG2_E
            total += 1.0

    for tile in tl.range(start, end):
        offset = token_offsets(page, tile, page_stride, PAGE_TOKENS, BLOCK_TOKENS, HEAD_DIM)
        value_offset = token_offsets(page, tile, page_stride, PAGE_TOKENS, BLOCK_TOKENS, VALUE_DIM)
        # The next tile's page id is loaded while this tile is computed.
        page = page_of_tile(table, tile + 1, begin, context, PAGE_TOKENS, BLOCK_TOKENS)
        position = tile * BLOCK_TOKENS + token
        seen = position < context
        if WINDOW != 0:
            seen = seen & (position >= begin)
        loaded = seen[:, None] & (dim < HEAD_DIM)[None, :]
        key = tl.load(keys + offset + cells, mask=loaded, other=0.0)
        scores = _dot(query, tl.trans(key), WIDE_DOT) * log2_scale
        if SOFTCAP > 0:
            scores = tanh(scores / SOFTCAP) * SOFTCAP
        scores = tl.where(is_seen(position, seen, contexts, WINDOW, TOKENS), scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1))
        base = finite(higher, TOKENS)
        weight = tl.exp2(scores - base[:, None])
        fade = tl.exp2(highest - base)
        total = total * fade + tl.sum(weight, axis=1)
        value_loaded = seen[:, None] & (value_dim < VALUE_DIM)[None, :]
        value = tl.load(values + value_offset + value_cells, mask=value_loaded, other=0.0)
        mixed = mixed * fade[:, None] + _dot(weight.to(value.dtype), value, WIDE_DOT)
        highest = higher
    return highest, total, mixed
