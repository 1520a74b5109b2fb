"""The kernels of `triton_attention.DecodeAttention`, which documents their arguments."""

from typing import NamedTuple

import triton
import triton.language as tl

from engine.kernels.attention.triton_attention_codes import attend_to_codes
from engine.kernels.attention.triton_attention_tiles import (
    attend,
    deliver,
    fetch_tile,
    first_seen,
    page_of_tile,
    tiles_of,
)
from engine.kernels.triton_launch import launch_dependents, wait_for_inputs


class TileRange(NamedTuple):
    """The tiles of one program of `persistent_attention_kernel`, as consecutive int32 numbers."""

    first_row: int
    """The first row that the range meets."""
    last_row: int
    """The row after the last one."""
    before: int
    """Tiles before the first row."""
    range_tiles: int
    """Tiles of each program's range."""
    least: int
    """Tiles that the shortest row takes."""


TILE_RANGE_FIELDS = tl.constexpr(len(TileRange._fields))


@triton.jit(
    do_not_specialize=["table_stride", "least_tiles"],
    do_not_specialize_on_alignment=["page_table", "context_lens"],
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
    least_tiles,
    GROUP: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    MERGED_SPLITS: tl.constexpr,
    LINES: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    PART_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    PDL: tl.constexpr,
    EARLY: tl.constexpr,
    WIDE_DOT: tl.constexpr,
):
    """Program (key head, row, split) computes a range of `least_tiles` tiles or an equal part of the row per split.

    One tile always has a visible position, so the running maximum is finite after it.
    """
    launch_dependents(PDL)
    kv_head = tl.program_id(0)
    head = tl.arange(0, GROUP_TILE)
    dim = tl.arange(0, DIM_PADDED)
    held = (head < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    if not EARLY:
        wait_for_inputs(PDL)

    row = tl.program_id(1)
    split = tl.program_id(2)
    q_cells = row * q_row_stride + (kv_head * GROUP + head)[:, None] * q_head_stride + dim[None, :]
    keys = cache + layer_offset + kv_head * HEAD_STRIDE
    values = keys + PART_STRIDE
    table = page_table + row * table_stride
    context = tl.load(context_lens + row)
    begin = first_seen(context, WINDOW)
    first_tile = begin // BLOCK_TOKENS
    tiles = tl.cdiv(context, BLOCK_TOKENS) - first_tile
    range_tiles = tl.maximum(tl.cdiv(tiles, tl.num_programs(2)), least_tiles)
    # A padded row has no tile; its first program still writes the zeros.
    active = tl.maximum(tl.cdiv(tiles, range_tiles), 1)
    start = first_tile + split * range_tiles
    end = tl.minimum(start + range_tiles, first_tile + tiles)
    page = page_of_tile(table, start, begin, context, PAGE_TOKENS, BLOCK_TOKENS)
    if EARLY:
        if PDL:
            fetch_tile(
                cache, keys, values, page, start, begin, context, page_stride,
                HEAD_DIM, DIM_PADDED, PAGE_TOKENS, BLOCK_TOKENS, LINES,
            )  # fmt: skip
        wait_for_inputs(PDL)
    CODES: tl.constexpr = cache.dtype.element_ty.primitive_bitwidth == 8
    if not CODES:
        # After the load of the page id: the query goes to shared memory at once, and no load is issued meanwhile.
        query = tl.load(q + q_cells, mask=held, other=0.0)

    if split < active:
        lane = row * KV_HEADS + kv_head
        if CODES:
            highest, total, mixed = attend_to_codes(
                q + row * q_row_stride + kv_head * GROUP * q_head_stride, q_head_stride, keys, values, table, page,
                start, end, begin, context, page_stride, log2_scale, sinks + kv_head * GROUP, split, GROUP, GROUP_TILE,
                HEAD_DIM, DIM_PADDED, PAGE_TOKENS, BLOCK_TOKENS, WINDOW, SOFTCAP, SINKS,
            )  # fmt: skip
        else:
            highest, total, mixed = attend(
                query, keys, values, table, page, start, end, begin, context, page_stride, log2_scale,
                sinks + kv_head * GROUP, split, GROUP, GROUP_TILE, HEAD_DIM, DIM_PADDED, PAGE_TOKENS, BLOCK_TOKENS,
                WINDOW, SOFTCAP, SINKS, WIDE_DOT,
            )  # fmt: skip
        deliver(
            highest, total, mixed, lane, split, active, lane * tl.num_programs(2), out, partials, partial_lse, counters,
            GROUP, GROUP_TILE, GROUP_PADDED, HEAD_DIM, DIM_PADDED, MERGED_SPLITS,
        )  # fmt: skip


@triton.jit
def _tiles_at(context_lens, first, rows, WINDOW: tl.constexpr, BLOCK_TOKENS: tl.constexpr, ROWS_TILE: tl.constexpr):
    """Returns the tiles [ROWS_TILE] of rows from `first` on, 0 of padded rows; and a mask of the rows that exist."""
    number = first + tl.arange(0, ROWS_TILE)
    context = tl.load(context_lens + number, mask=number < rows, other=0)
    return tiles_of(context, WINDOW, BLOCK_TOKENS), number < rows


@triton.jit
def _span_of(tiles, least):
    """Returns the tiles that a row takes of the concatenation: one if it is padded, as its zeros must be written."""
    return tl.where(tiles > 0, tl.maximum(tiles, least), 1)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["context_lens"])
def plan_tile_ranges_kernel(
    context_lens,
    tile_ranges,
    rows,
    WINDOW: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    ROWS_TILE: tl.constexpr,
):
    """Program (unit): cuts all rows' concatenated tiles into ranges of equal length, one per program.

    → tile_ranges [units, TILE_RANGE_FIELDS] int32, see `TileRange`.
    """
    unit = tl.program_id(0)
    units = tl.num_programs(0)
    total = 0
    present = 0
    longest = 0
    for first in tl.range(0, rows, ROWS_TILE):
        tiles, _ = _tiles_at(context_lens, first, rows, WINDOW, BLOCK_TOKENS, ROWS_TILE)
        total += tl.sum(tiles)
        present += tl.sum((tiles > 0).to(tl.int32))
        longest = tl.maximum(longest, tl.max(tiles))
    padded = rows - present
    # Rows of similar length get spans of equal length, where whole spans, or equal parts of them, fill the programs
    # with at most an eighth of waste: no row is cut unnecessarily.
    parts = tl.maximum(units // tl.maximum(present, 1), 1)
    span = tl.cdiv(longest, parts) * parts
    even = tl.where(present <= units, span // parts, tl.cdiv(present, units) * longest)
    fits = (8 * even * units <= 9 * total) & (present * span + padded <= even * units)
    range_tiles = tl.where(fits, even, tl.cdiv(total + padded, units))
    least = tl.where(fits, span, 1)

    start = unit * range_tiles
    end = start + range_tiles
    first_row = 0
    last_row = 0
    before = 0
    passed = 0
    for first in tl.range(0, rows, ROWS_TILE):
        tiles, there = _tiles_at(context_lens, first, rows, WINDOW, BLOCK_TOKENS, ROWS_TILE)
        spans = tl.where(there, _span_of(tiles, least), 0)
        ends = passed + tl.cumsum(spans, 0)
        ended = there & (ends <= start)
        first_row += tl.sum(ended.to(tl.int32))
        before += tl.sum(tl.where(ended, spans, 0))
        last_row += tl.sum((there & (ends - spans < end)).to(tl.int32))
        passed += tl.sum(spans)
    tile_range = tile_ranges + unit * TILE_RANGE_FIELDS
    tl.store(tile_range, first_row)
    tl.store(tile_range + 1, last_row)
    tl.store(tile_range + 2, before)
    tl.store(tile_range + 3, range_tiles)
    tl.store(tile_range + 4, least)


@triton.jit(
    do_not_specialize=["table_stride", "rows"],
    do_not_specialize_on_alignment=["page_table", "context_lens"],
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
    tile_ranges,
    rows,
    GROUP: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    MERGED_SPLITS: tl.constexpr,
    LINES: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    PART_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    PDL: tl.constexpr,
    EARLY: tl.constexpr,
    WIDE_DOT: tl.constexpr,
):
    """Program (key head, unit) computes the rows of its range one after another, so none waits for the longest.

    See `plan_tile_ranges_kernel`. The partial results of a row and key head are adjacent, at index row + first unit.
    """
    launch_dependents(PDL)
    kv_head = tl.program_id(0)
    unit = tl.program_id(1)
    head = tl.arange(0, GROUP_TILE)
    dim = tl.arange(0, DIM_PADDED)
    held = (head < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
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
            context = tl.load(context_lens + row, mask=first_row < last_row, other=0)
            begin = first_seen(context, WINDOW)
            start = begin // BLOCK_TOKENS + start_tile - before
            page = page_of_tile(page_table + row * table_stride, start, begin, context, PAGE_TOKENS, BLOCK_TOKENS)
            fetch_tile(
                cache, keys, values, page, start, begin, context, page_stride,
                HEAD_DIM, DIM_PADDED, PAGE_TOKENS, BLOCK_TOKENS, LINES,
            )  # fmt: skip
        wait_for_inputs(PDL)

    CODES: tl.constexpr = cache.dtype.element_ty.primitive_bitwidth == 8
    flat = before
    for row in tl.range(first_row, last_row):
        context = tl.load(context_lens + row)
        begin = first_seen(context, WINDOW)
        first_tile = begin // BLOCK_TOKENS
        tiles = tl.cdiv(context, BLOCK_TOKENS) - first_tile
        span = _span_of(tiles, least)
        start = first_tile + tl.maximum(start_tile - flat, 0)
        end = first_tile + tl.minimum(end_tile - flat, tiles)
        first_unit = flat // range_tiles
        active = (flat + span - 1) // range_tiles - first_unit + 1
        table = page_table + row * table_stride
        page = page_of_tile(table, start, begin, context, PAGE_TOKENS, BLOCK_TOKENS)
        if CODES:
            highest, mass, mixed = attend_to_codes(
                q + row * q_row_stride + kv_head * GROUP * q_head_stride, q_head_stride, keys, values, table, page,
                start, end, begin, context, page_stride, log2_scale, sinks + kv_head * GROUP, unit - first_unit, GROUP,
                GROUP_TILE, HEAD_DIM, DIM_PADDED, PAGE_TOKENS, BLOCK_TOKENS, WINDOW, SOFTCAP, SINKS,
            )  # fmt: skip
        else:
            q_cells = row * q_row_stride + (kv_head * GROUP + head)[:, None] * q_head_stride + dim[None, :]
            query = tl.load(q + q_cells, mask=held, other=0.0)
            highest, mass, mixed = attend(
                query, keys, values, table, page, start, end, begin, context, page_stride, log2_scale,
                sinks + kv_head * GROUP, unit - first_unit, GROUP, GROUP_TILE, HEAD_DIM, DIM_PADDED, PAGE_TOKENS,
                BLOCK_TOKENS, WINDOW, SOFTCAP, SINKS, WIDE_DOT,
            )  # fmt: skip
        deliver(
            highest, mass, mixed, row * KV_HEADS + kv_head, unit - first_unit, active,
            kv_head * (tl.num_programs(1) + rows) + first_unit + row, out, partials, partial_lse, counters,
            GROUP, GROUP_TILE, GROUP_PADDED, HEAD_DIM, DIM_PADDED, MERGED_SPLITS,
        )  # fmt: skip
        flat += span
