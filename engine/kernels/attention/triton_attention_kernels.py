"""The kernels of `triton_attention.DecodeAttention`; their arguments are named there, their steps are those of
`triton_attention_tiles`.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from engine.kernels.attention.triton_attention_tiles import (
    attend,
    deliver,
    fetch_tile,
    first_seen,
    page_of_tile,
    tiles_of,
)
from engine.kernels.triton_launch import launch_dependents, wait_for_inputs


class Walk(NamedTuple):
    """What a program of `walking_attention_kernel` is told: int32 numbers, one behind the other."""

    first_row: int
    """The first row that its stretch meets."""
    last_row: int
    """The row behind the last one."""
    before: int
    """Tiles of the line before the first row."""
    stretch: int
    """Tiles of its stretch, as of every other's."""
    least: int
    """Tiles of the shortest row's place in the line."""


WALK_FIELDS = tl.constexpr(len(Walk._fields))


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
    WINDOW: tl.constexpr,
    PDL: tl.constexpr,
    EARLY: tl.constexpr,
    WIDE_DOT: tl.constexpr,
):
    """Program (key head, row, split); a stretch is `least_tiles` tiles or what divides the row over all splits.

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
    keys = cache + layer_offset + kv_head * (PAGE_TOKENS * HEAD_DIM)
    values = keys + KV_HEADS * PAGE_TOKENS * HEAD_DIM
    table = page_table + row * table_stride
    context = tl.load(context_lens + row)
    begin = first_seen(context, WINDOW)
    first_tile = begin // BLOCK_TOKENS
    tiles = tl.cdiv(context, BLOCK_TOKENS) - first_tile
    stretch = tl.maximum(tl.cdiv(tiles, tl.num_programs(2)), least_tiles)
    # A padded row has no tile; its first program still writes the zeros.
    active = tl.maximum(tl.cdiv(tiles, stretch), 1)
    start = first_tile + split * stretch
    end = tl.minimum(start + stretch, first_tile + tiles)
    page = page_of_tile(table, start, begin, context, PAGE_TOKENS, BLOCK_TOKENS)
    if EARLY:
        if PDL:
            fetch_tile(
                cache, keys, values, page, start, begin, context, page_stride,
                HEAD_DIM, DIM_PADDED, PAGE_TOKENS, BLOCK_TOKENS, LINES,
            )  # fmt: skip
        wait_for_inputs(PDL)
    # Not before the page id is asked for: the query goes to shared memory at once, and nothing is asked for meanwhile.
    query = tl.load(q + q_cells, mask=held, other=0.0)

    if split < active:
        lane = row * KV_HEADS + kv_head
        highest, total, mixed = attend(
            query, keys, values, table, page, start, end, begin, context, page_stride, log2_scale,
            GROUP_TILE, HEAD_DIM, DIM_PADDED, PAGE_TOKENS, BLOCK_TOKENS, WINDOW, WIDE_DOT,
        )  # fmt: skip
        deliver(
            highest, total, mixed, lane, split, active, lane * tl.num_programs(2), out, partials, partial_lse, counters,
            GROUP, GROUP_TILE, GROUP_PADDED, HEAD_DIM, DIM_PADDED, MERGED_SPLITS,
        )  # fmt: skip


@triton.jit
def _tiles_at(context_lens, first, rows, WINDOW: tl.constexpr, BLOCK_TOKENS: tl.constexpr, ROWS_TILE: tl.constexpr):
    """Tiles [ROWS_TILE] of rows from `first` on, 0 of padded rows; and which of them there are."""
    number = first + tl.arange(0, ROWS_TILE)
    context = tl.load(context_lens + number, mask=number < rows, other=0)
    return tiles_of(context, WINDOW, BLOCK_TOKENS), number < rows


@triton.jit
def _place_of(tiles, least):
    """Tiles that a row of so many takes of the line: one if it is padded, as somebody has to write its zeros."""
    return tl.where(tiles > 0, tl.maximum(tiles, least), 1)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["context_lens"])
def plan_walks_kernel(
    context_lens,
    walks,
    rows,
    WINDOW: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    ROWS_TILE: tl.constexpr,
):
    """Program (unit): all rows' tiles lie in one line, cut into stretches of one length, a program's each. → walks
    [units, WALK_FIELDS] int32, see `Walk`.
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
    # Rows of about one length get places of one length, where whole places, or equal parts of them, fill the programs
    # to an eighth: no row is cut that need not be.
    parts = tl.maximum(units // tl.maximum(present, 1), 1)
    place = tl.cdiv(longest, parts) * parts
    even = tl.where(present <= units, place // parts, tl.cdiv(present, units) * longest)
    fits = (8 * even * units <= 9 * total) & (present * place + padded <= even * units)
    stretch = tl.where(fits, even, tl.cdiv(total + padded, units))
    least = tl.where(fits, place, 1)

    start = unit * stretch
    end = start + stretch
    first_row = 0
    last_row = 0
    before = 0
    passed = 0
    for first in tl.range(0, rows, ROWS_TILE):
        tiles, there = _tiles_at(context_lens, first, rows, WINDOW, BLOCK_TOKENS, ROWS_TILE)
        places = tl.where(there, _place_of(tiles, least), 0)
        ends = passed + tl.cumsum(places, 0)
        ended = there & (ends <= start)
        first_row += tl.sum(ended.to(tl.int32))
        before += tl.sum(tl.where(ended, places, 0))
        last_row += tl.sum((there & (ends - places < end)).to(tl.int32))
        passed += tl.sum(places)
    walk = walks + unit * WALK_FIELDS
    tl.store(walk, first_row)
    tl.store(walk + 1, last_row)
    tl.store(walk + 2, before)
    tl.store(walk + 3, stretch)
    tl.store(walk + 4, least)


@triton.jit(
    do_not_specialize=["table_stride", "rows"],
    do_not_specialize_on_alignment=["page_table", "context_lens"],
)
def walking_attention_kernel(
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
    walks,
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
    WINDOW: tl.constexpr,
    PDL: tl.constexpr,
    EARLY: tl.constexpr,
    WIDE_DOT: tl.constexpr,
):
    """Program (key head, unit) takes whatever rows its stretch meets, one after another, so none is held up by the
    longest; see `plan_walks_kernel`. The partial results of a row and key head lie side by side, the row's number
    behind the unit's.
    """
    launch_dependents(PDL)
    kv_head = tl.program_id(0)
    unit = tl.program_id(1)
    head = tl.arange(0, GROUP_TILE)
    dim = tl.arange(0, DIM_PADDED)
    held = (head < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    if not EARLY:
        wait_for_inputs(PDL)

    walk = walks + unit * WALK_FIELDS
    first_row = tl.load(walk)
    last_row = tl.load(walk + 1)
    before = tl.load(walk + 2)
    stretch = tl.load(walk + 3)
    least = tl.load(walk + 4)
    start_tile = unit * stretch
    end_tile = start_tile + stretch

    keys = cache + layer_offset + kv_head * (PAGE_TOKENS * HEAD_DIM)
    values = keys + KV_HEADS * PAGE_TOKENS * HEAD_DIM
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

    flat = before
    for row in tl.range(first_row, last_row):
        context = tl.load(context_lens + row)
        begin = first_seen(context, WINDOW)
        first_tile = begin // BLOCK_TOKENS
        tiles = tl.cdiv(context, BLOCK_TOKENS) - first_tile
        place = _place_of(tiles, least)
        start = first_tile + tl.maximum(start_tile - flat, 0)
        end = first_tile + tl.minimum(end_tile - flat, tiles)
        first_unit = flat // stretch
        active = (flat + place - 1) // stretch - first_unit + 1
        table = page_table + row * table_stride
        page = page_of_tile(table, start, begin, context, PAGE_TOKENS, BLOCK_TOKENS)
        q_cells = row * q_row_stride + (kv_head * GROUP + head)[:, None] * q_head_stride + dim[None, :]
        query = tl.load(q + q_cells, mask=held, other=0.0)
        highest, mass, mixed = attend(
            query, keys, values, table, page, start, end, begin, context, page_stride, log2_scale,
            GROUP_TILE, HEAD_DIM, DIM_PADDED, PAGE_TOKENS, BLOCK_TOKENS, WINDOW, WIDE_DOT,
        )  # fmt: skip
        deliver(
            highest, mass, mixed, row * KV_HEADS + kv_head, unit - first_unit, active,
            kv_head * (tl.num_programs(1) + rows) + first_unit + row, out, partials, partial_lse, counters,
            GROUP, GROUP_TILE, GROUP_PADDED, HEAD_DIM, DIM_PADDED, MERGED_SPLITS,
        )  # fmt: skip
        flat += place
