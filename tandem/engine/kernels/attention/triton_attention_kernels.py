"""The kernels of `triton_attention.DecodeAttention`, which documents their arguments."""

import triton
import triton.language as tl

from tandem.engine.kernels.attention.triton_attention_codes import attend_to_codes
from tandem.engine.kernels.attention.triton_attention_ranges import TILE_RANGE_FIELDS, span_of
from tandem.engine.kernels.attention.triton_attention_results import clear_padding, deliver
from tandem.engine.kernels.attention.triton_attention_tiles import (
    attend,
    fetch_tile,
    first_seen,
    group_of,
    heads_of,
    held_queries,
    page_of_tile,
)
from tandem.engine.kernels.triton_launch import launch_dependents, wait_for_inputs


@triton.jit(
    do_not_specialize=["table_stride", "tokens", "least_tiles"],
    do_not_specialize_on_alignment=["page_table", "context_lens", "groups"],
)
def split_attention_kernel(
    q,
    cache,
    page_table,
    context_lens,
    out,
    partials,
    partial_lse,
    counters,
    q_row_stride,
    q_head_stride,
    layer_offset,
    page_stride,
    table_stride,
    log2_scale,
    sinks,
    groups,
    tokens,
    least_tiles,
    GROUP: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    MERGED_TILE: tl.constexpr,
    MERGED_SPLITS: tl.constexpr,
    LINES: tl.constexpr,
    VALUE_LINES: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    PART_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    TOKENS: tl.constexpr,
    PDL: tl.constexpr,
    EARLY: tl.constexpr,
    WIDE_DOT: tl.constexpr,
):
    """Program (key head, row, split) computes one of the equal ranges of the row's tiles.

    A range has at least `least_tiles` tiles, so the last programs of a short row compute nothing. Every tile has a
    visible position, so the running maximum is finite after the first tile.
    """
    launch_dependents(PDL)
    kv_head = tl.program_id(0)
    dim = tl.arange(0, DIM_PADDED)
    if not EARLY:
        wait_for_inputs(PDL)

    row = tl.program_id(1)
    split = tl.program_id(2)
    first_row, count, shortest, context, contexts, query_rows = group_of(
        row, groups, context_lens, GROUP_TILE, GROUP_PADDED, TOKENS
    )
    query_held = held_queries(count, GROUP_TILE, GROUP, GROUP_PADDED, TOKENS)
    query_head = kv_head * GROUP + heads_of(GROUP_TILE, GROUP_PADDED, TOKENS)
    query_at = q + query_rows * q_row_stride + query_head * q_head_stride
    keys = cache + layer_offset + kv_head * HEAD_STRIDE
    values = keys + PART_STRIDE
    table = page_table + first_row * table_stride
    begin = first_seen(shortest, WINDOW)
    first_tile = begin // BLOCK_TOKENS
    tiles = tl.cdiv(context, BLOCK_TOKENS) - first_tile
    range_tiles = tl.maximum(tl.cdiv(tiles, tl.num_programs(2)), least_tiles)
    # A padding row has no tile, but its first program still has to write the zeros.
    active = tl.maximum(tl.cdiv(tiles, range_tiles), 1)
    start = first_tile + split * range_tiles
    end = tl.minimum(start + range_tiles, first_tile + tiles)
    page = page_of_tile(table, start, begin, context, PAGE_TOKENS, BLOCK_TOKENS)
    if EARLY:
        if PDL:
            fetch_tile(
                cache, keys, page, start, begin, context, page_stride,
                HEAD_DIM, DIM_PADDED, PAGE_TOKENS, BLOCK_TOKENS, LINES,
            )  # fmt: skip
            fetch_tile(
                cache, values, page, start, begin, context, page_stride,
                VALUE_DIM, VALUE_PADDED, PAGE_TOKENS, BLOCK_TOKENS, VALUE_LINES,
            )  # fmt: skip
        wait_for_inputs(PDL)
    CODES: tl.constexpr = cache.dtype.element_ty.primitive_bitwidth == 8
    if not CODES:
        # Loaded after the page id: the query goes to shared memory at once, and no other load could be issued while it
        # does.
        held = query_held[:, None] & (dim < HEAD_DIM)[None, :]
        query = tl.load(query_at[:, None] + dim[None, :], mask=held, other=0.0)

    if split < active:
        lane = row * KV_HEADS + kv_head
        if CODES:
            highest, total, mixed = attend_to_codes(
                query_at, query_held, keys, values, table, page, start, end, begin, context, page_stride, log2_scale,
                sinks + kv_head * GROUP, split, contexts, GROUP, GROUP_TILE, GROUP_PADDED, HEAD_DIM, DIM_PADDED,
                VALUE_DIM, VALUE_PADDED, PAGE_TOKENS, BLOCK_TOKENS, WINDOW, SOFTCAP, SINKS, TOKENS,
            )  # fmt: skip
        else:
            highest, total, mixed = attend(
                query, keys, values, table, page, start, end, begin, context, page_stride, log2_scale,
                sinks + kv_head * GROUP, split, contexts, GROUP, GROUP_TILE, GROUP_PADDED, HEAD_DIM, DIM_PADDED,
                VALUE_DIM, VALUE_PADDED, PAGE_TOKENS, BLOCK_TOKENS, WINDOW, SOFTCAP, SINKS, TOKENS, WIDE_DOT,
            )  # fmt: skip
        deliver(
            highest, total, mixed, lane, split, active, lane * tl.num_programs(2), query_rows * KV_HEADS + kv_head,
            count, out, partials, partial_lse, counters, GROUP, GROUP_TILE, GROUP_PADDED, VALUE_DIM, VALUE_PADDED,
            MERGED_TILE, MERGED_SPLITS, TOKENS,
        )  # fmt: skip
    if TOKENS > 1:
        clear_padding(
            out, groups + 3 * tl.num_programs(1), tokens, kv_head, row * tl.num_programs(2) + split,
            tl.num_programs(1) * tl.num_programs(2), GROUP, GROUP_PADDED, KV_HEADS, VALUE_DIM, VALUE_PADDED,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["table_stride", "tokens", "rows"],
    do_not_specialize_on_alignment=["page_table", "context_lens", "groups"],
)
def persistent_attention_kernel(
    q,
    cache,
    page_table,
    context_lens,
    out,
    partials,
    partial_lse,
    counters,
    q_row_stride,
    q_head_stride,
    layer_offset,
    page_stride,
    table_stride,
    log2_scale,
    sinks,
    groups,
    tokens,
    tile_ranges,
    rows,
    GROUP: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    MERGED_TILE: tl.constexpr,
    MERGED_SPLITS: tl.constexpr,
    LINES: tl.constexpr,
    VALUE_LINES: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    PART_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    TOKENS: tl.constexpr,
    PDL: tl.constexpr,
    EARLY: tl.constexpr,
    WIDE_DOT: tl.constexpr,
):
    """Program (key head, unit) computes the part of each row that is in the unit's range, one row after another.

    See `triton_attention_ranges.py`. The partial results of a row and key head are adjacent; the first one is at index
    row + the first unit whose range contains tiles of the row.
    """
    launch_dependents(PDL)
    kv_head = tl.program_id(0)
    unit = tl.program_id(1)
    dim = tl.arange(0, DIM_PADDED)
    if not EARLY:
        wait_for_inputs(PDL)

    tile_range = tile_ranges + unit * TILE_RANGE_FIELDS
    first_row = tl.load(tile_range)
    last_row = tl.load(tile_range + 1)
    before = tl.load(tile_range + 2)
    range_tiles = tl.load(tile_range + 3)
    least = tl.load(tile_range + 4)
    start_tile = unit * range_tiles
    end_tile = start_tile + range_tiles

    keys = cache + layer_offset + kv_head * HEAD_STRIDE
    values = keys + PART_STRIDE
    if EARLY:
        if PDL:
            row = tl.minimum(first_row, rows - 1)
            table_row, _, shortest, context, _, _ = group_of(
                row, groups, context_lens, GROUP_TILE, GROUP_PADDED, TOKENS
            )
            context = tl.where(first_row < last_row, context, 0)
            begin = first_seen(tl.where(first_row < last_row, shortest, 0), WINDOW)
            start = begin // BLOCK_TOKENS + start_tile - before
            table = page_table + table_row * table_stride
            page = page_of_tile(table, start, begin, context, PAGE_TOKENS, BLOCK_TOKENS)
            fetch_tile(
                cache, keys, page, start, begin, context, page_stride,
                HEAD_DIM, DIM_PADDED, PAGE_TOKENS, BLOCK_TOKENS, LINES,
            )  # fmt: skip
            fetch_tile(
                cache, values, page, start, begin, context, page_stride,
                VALUE_DIM, VALUE_PADDED, PAGE_TOKENS, BLOCK_TOKENS, VALUE_LINES,
            )  # fmt: skip
        wait_for_inputs(PDL)

    CODES: tl.constexpr = cache.dtype.element_ty.primitive_bitwidth == 8
    flat = before
    for row in tl.range(first_row, last_row):
        table_row, count, shortest, context, contexts, query_rows = group_of(
            row, groups, context_lens, GROUP_TILE, GROUP_PADDED, TOKENS
        )
        begin = first_seen(shortest, WINDOW)
        first_tile = begin // BLOCK_TOKENS
        tiles = tl.cdiv(context, BLOCK_TOKENS) - first_tile
        span = span_of(tiles, least)
        start = first_tile + tl.maximum(start_tile - flat, 0)
        end = first_tile + tl.minimum(end_tile - flat, tiles)
        first_unit = flat // range_tiles
        active = (flat + span - 1) // range_tiles - first_unit + 1
        table = page_table + table_row * table_stride
        page = page_of_tile(table, start, begin, context, PAGE_TOKENS, BLOCK_TOKENS)
        query_held = held_queries(count, GROUP_TILE, GROUP, GROUP_PADDED, TOKENS)
        query_head = kv_head * GROUP + heads_of(GROUP_TILE, GROUP_PADDED, TOKENS)
        query_at = q + query_rows * q_row_stride + query_head * q_head_stride
        if CODES:
            highest, mass, mixed = attend_to_codes(
                query_at, query_held, keys, values, table, page, start, end, begin, context, page_stride, log2_scale,
                sinks + kv_head * GROUP, unit - first_unit, contexts, GROUP, GROUP_TILE, GROUP_PADDED, HEAD_DIM,
                DIM_PADDED, VALUE_DIM, VALUE_PADDED, PAGE_TOKENS, BLOCK_TOKENS, WINDOW, SOFTCAP, SINKS, TOKENS,
            )  # fmt: skip
        else:
            held = query_held[:, None] & (dim < HEAD_DIM)[None, :]
            query = tl.load(query_at[:, None] + dim[None, :], mask=held, other=0.0)
            highest, mass, mixed = attend(
                query, keys, values, table, page, start, end, begin, context, page_stride, log2_scale,
                sinks + kv_head * GROUP, unit - first_unit, contexts, GROUP, GROUP_TILE, GROUP_PADDED, HEAD_DIM,
                DIM_PADDED, VALUE_DIM, VALUE_PADDED, PAGE_TOKENS, BLOCK_TOKENS, WINDOW, SOFTCAP, SINKS, TOKENS,
                WIDE_DOT,
            )  # fmt: skip
        deliver(
            highest, mass, mixed, row * KV_HEADS + kv_head, unit - first_unit, active,
            kv_head * (tl.num_programs(1) + rows) + first_unit + row, query_rows * KV_HEADS + kv_head, count, out,
            partials, partial_lse, counters, GROUP, GROUP_TILE, GROUP_PADDED, VALUE_DIM, VALUE_PADDED, MERGED_TILE,
            MERGED_SPLITS, TOKENS,
        )  # fmt: skip
        flat += span
    if TOKENS > 1:
        clear_padding(
            out, groups + 3 * rows, tokens, kv_head, unit, tl.num_programs(1),
            GROUP, GROUP_PADDED, KV_HEADS, VALUE_DIM, VALUE_PADDED,
        )  # fmt: skip
