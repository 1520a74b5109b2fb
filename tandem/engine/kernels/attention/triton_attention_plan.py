"""Plans of decode attention by rows, heads and GPU: tile sizes, and the number of programs.

Measured in whole steps, see docs/decisions/attention_kernels.md. No Triton.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from tandem.engine.config.attention import AttentionShape

LEAST_DOT = 16
"""The least number of rows of a tile that the matrix units take."""
PROGRAMS_PER_SM, NARROW_PROGRAMS_PER_SM = 2, 4
"""Programs that are resident per multiprocessor, the second with `NARROW_TILE`.

With more, those of the next call would start before this one's have ended, and overload some multiprocessors.
"""
ROUNDS = 2
"""The factor on the number of programs where there are rows for each: early finishers take one more."""
NEARLY = 15 / 16
"""The part of these programs from which on a number that divides rows of one length evenly is used instead."""
MOST_SPLITS = 32
"""The largest useful number of splits: more make a row no faster, as its last program has to merge them."""
MOST_GROUP_SPLITS, LEAST_GROUP_TILES = 16, 4
"""The same for a group of several rows, whose last program merges as many times as much, and the shortest range."""
GROUP_TILE_MAX = 32
"""The largest tile of a group: larger ones need more registers than leave room for a second program."""
GROUP_ROWS_MAX = 8
"""The most rows of a group: of a request with seven drafts."""
EXACT_SPLITS, EXACT_TOKENS = 8, 512
"""Splits and shortest range of float32, whatever the batch."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a call: tokens of a tile, warps, pipeline stages, and either `units` or `splits`."""

    block_tokens: int
    warps: int
    stages: int
    units: int = 0
    """Programs that share the tiles of all rows; 0 = each row has its own."""
    splits: int = 1
    """Programs of each row."""
    least_tiles: int = 1
    """Tiles of the shortest range of a row that is split."""
    shared_percent: int = 0
    """Part of a multiprocessor's memory requested as shared memory (see `prefer_shared_memory`); 0 = no preference."""

    def partials(self, rows: int) -> int:
        """Return the maximum number of partial results of `rows` rows per key head."""
        return self.units + rows if self.units else self.splits * rows


SMALL_TILE = Plan(block_tokens=32, warps=2, stages=4, shared_percent=50)
"""The tile for few rows: small tiles are loaded soonest, and the kernels around them count.

Half of the memory as shared memory lets those run at the same time, as they use the other half.
"""
LARGE_TILE = Plan(block_tokens=128, warps=4, stages=2)
"""The tile for many rows: its registers allow `PROGRAMS_PER_SM`."""
ROUNDS_TILE = Plan(block_tokens=64, warps=4, stages=3, shared_percent=72)
"""The tile for `ROUNDS`: it gets 164 of 228 KiB, which fits `PROGRAMS_PER_SM` of 64 KiB each."""
LARGE_TILE_DIMS = 128
"""The largest head dim for which these two fit into shared memory."""
NARROW_TILE = Plan(block_tokens=64, warps=2, stages=3)
"""The tile for many rows of narrow heads, whose tiles are smaller."""
NARROW_DIMS = 64
"""The largest head dim of narrow heads."""

CODE_TILES = {
    SMALL_TILE: Plan(block_tokens=64, warps=4, stages=3, shared_percent=50),
    LARGE_TILE: Plan(block_tokens=128, warps=4, stages=3),
    ROUNDS_TILE: Plan(block_tokens=128, warps=4, stages=3, shared_percent=72),
    NARROW_TILE: Plan(block_tokens=128, warps=2, stages=3),
}
"""The tiles over 8-bit keys and values that take the place of these: about as many bytes at a time."""
ONE_ROW_CODE_TILE = Plan(block_tokens=64, warps=2, stages=4, shared_percent=50)
"""The tile over 8-bit keys and values for one row: 8.0 µs instead of 10.7 for 1,024 tokens of an 8B model's layer."""

PlanFunction = Callable[[int, int, int, int, torch.dtype, int], Plan]
"""`make_plan` or a replacement of it."""


def make_plan(rows: int, kv_heads: int, head_dim: int, capacity: int, dtype: torch.dtype, sms: int) -> Plan:
    """Return the plan of `rows` rows of at most `capacity` seen tokens on a GPU of `sms` multiprocessors.

    `dtype` is that of the cache, or float32 if queries are. These are split the same way whatever the batch, so that a
    row's bits do not depend on the other rows.
    """
    if dtype == torch.float32:
        block = LEAST_DOT
        splits = min(EXACT_SPLITS, -(-capacity // EXACT_TOKENS))
        return Plan(block, warps=4, stages=2, splits=splits, least_tiles=EXACT_TOKENS // block)
    tile, programs = SMALL_TILE, PROGRAMS_PER_SM * sms
    if rows * kv_heads > programs and head_dim <= NARROW_DIMS:
        tile, programs = NARROW_TILE, NARROW_PROGRAMS_PER_SM * sms
    elif rows * kv_heads > programs and head_dim <= LARGE_TILE_DIMS:
        tile = LARGE_TILE
    resident = max(1, programs // kv_heads)
    if rows >= ROUNDS * resident and tile is not SMALL_TILE:
        tile = ROUNDS_TILE if tile is LARGE_TILE else tile
        resident *= ROUNDS
    if dtype.itemsize == 1:
        tile = ONE_ROW_CODE_TILE if rows == 1 else CODE_TILES[tile]
    most = min(MOST_SPLITS, -(-capacity // tile.block_tokens))
    if rows == 1:
        return replace(tile, splits=min(resident, most))
    whole = resident // rows * rows
    return replace(tile, units=min(whole if whole >= NEARLY * resident else resident, rows * most))


def group_rows(shapes: Iterable[AttentionShape], drafts: int) -> int:
    """Return the most rows of a group (`DecodeAttention`) in steps where a request has up to `drafts` drafts.

    The rows' queries fill the matrix units' smallest tile if it holds all rows of a request, else `GROUP_TILE_MAX`. 1
    where the heads of a key head fill it, and without shapes.
    """
    heads = max((1 << (shape.heads // shape.kv_heads - 1).bit_length() for shape in shapes), default=GROUP_TILE_MAX)
    tile = LEAST_DOT if (drafts + 1) * heads <= LEAST_DOT else GROUP_TILE_MAX
    return max(1, min(GROUP_ROWS_MAX, tile // heads))


def make_group_plan(rows: int, kv_heads: int, head_dim: int, capacity: int, dtype: torch.dtype, sms: int) -> Plan:
    """Return the plan of `rows` groups, see `make_plan`; of float32 the same.

    Their tiles of queries are larger: `SMALL_TILE` gets more warps, and `ROUNDS_TILE` takes the place of `LARGE_TILE`,
    whose registers would not do.
    """
    plan = make_plan(rows, kv_heads, head_dim, capacity, dtype, sms)
    if dtype == torch.float32:
        return plan
    if plan.splits > 1:
        plan = replace(plan, splits=min(plan.splits, MOST_GROUP_SPLITS), least_tiles=LEAST_GROUP_TILES)
    if plan.block_tokens == SMALL_TILE.block_tokens:
        plan = replace(plan, warps=2 * plan.warps)
    elif dtype.itemsize > 1 and plan.block_tokens == LARGE_TILE.block_tokens:
        plan = replace(ROUNDS_TILE, units=plan.units)
    return plan
