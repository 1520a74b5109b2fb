"""The kernel that divides a step's tiles into ranges, one for each program of `persistent_attention_kernel`."""

from typing import NamedTuple

import triton
import triton.language as tl

from tandem.engine.kernels.attention.triton_attention_tiles import first_seen


class TileRange(NamedTuple):
    """The range of tiles of one program of `persistent_attention_kernel`, stored as consecutive int32 numbers."""

    first_row: int
    """The first row that has tiles in the range."""
    last_row: int
    """The end of the rows in the range, exclusive: one more than the last row that has tiles in the range."""
    before: int
    """The number of tiles that all rows before `first_row` take in the concatenation: the sum of their `span_of`."""
    range_tiles: int
    """The length of every program's range, in tiles."""
    least: int
    """The minimum number of tiles that a row takes in the concatenation (see `span_of`)."""


TILE_RANGE_FIELDS = tl.constexpr(len(TileRange._fields))


@triton.jit
def _tiles_at(
    context_lens,
    groups,
    first,
    rows,
    WINDOW: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    ROWS_TILE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Return the number of tiles [ROWS_TILE] of rows from `first` on, 0 for padding, and a mask of existing rows."""
    number = first + tl.arange(0, ROWS_TILE)
    there = number < rows
    if TOKENS == 1:
        context = tl.load(context_lens + number, mask=there, other=0)
        longest = context
    else:
        count = tl.load(groups + 3 * number + 2, mask=there, other=0)
        first_row = tl.load(groups + 3 * number, mask=there, other=0)
        context = tl.load(context_lens + first_row, mask=count > 0, other=0)
        longest = context + tl.maximum(count - 1, 0)
    return tl.cdiv(longest, BLOCK_TOKENS) - first_seen(context, WINDOW) // BLOCK_TOKENS, there


@triton.jit
def span_of(tiles, least):
    """Return the number of tiles that a row takes in the concatenation of all rows' tiles: at least `least`.

    A padding row takes one tile, because a program has to write its zeros.
    """
    return tl.where(tiles > 0, tl.maximum(tiles, least), 1)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["context_lens", "groups"])
def plan_tile_ranges_kernel(
    context_lens,
    groups,
    tile_ranges,
    rows,
    WINDOW: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    ROWS_TILE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Program (unit) cuts the concatenated tiles of all rows into ranges of equal length, and stores the unit's range.

    → tile_ranges [units, TILE_RANGE_FIELDS] int32, see `TileRange`.
    """
    unit = tl.program_id(0)
    units = tl.num_programs(0)
    total = 0
    present = 0
    longest = 0
    for first in tl.range(0, rows, ROWS_TILE):
        tiles, _ = _tiles_at(context_lens, groups, first, rows, WINDOW, BLOCK_TOKENS, ROWS_TILE, TOKENS)
        total += tl.sum(tiles)
        present += tl.sum((tiles > 0).to(tl.int32))
        longest = tl.maximum(longest, tl.max(tiles))
    padded = rows - present
    if TOKENS > 1:
        padded = 0  # groups without rows come last, and no program visits them
    # If rows have similar lengths, each gets a span of equal length, provided that whole spans, or equal parts of them,
    # fill the programs with at most an eighth of waste. Then no row is cut unnecessarily.
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
        tiles, there = _tiles_at(context_lens, groups, first, rows, WINDOW, BLOCK_TOKENS, ROWS_TILE, TOKENS)
        spans = tl.where(there, span_of(tiles, least), 0)
        ends = passed + tl.cumsum(spans, 0)
        ended = there & (ends <= start)
        first_row += tl.sum(ended.to(tl.int32))
        before += tl.sum(tl.where(ended, spans, 0))
        last_row += tl.sum((there & (ends - spans < end)).to(tl.int32))
        passed += tl.sum(spans)
    if TOKENS > 1:
        last_row = tl.minimum(last_row, present)
    tile_range = tile_ranges + unit * TILE_RANGE_FIELDS
    tl.store(tile_range, first_row)
    tl.store(tile_range + 1, last_row)
    tl.store(tile_range + 2, before)
    tl.store(tile_range + 3, range_tiles)
    tl.store(tile_range + 4, least)
