"""Plans of decode attention by rows, heads and GPU: tile sizes, and the number of programs.

The constants were measured in whole steps, see docs/decisions/attention_kernels.md. Nothing here needs Triton.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from tandem.engine.config.attention import AttentionShape

LEAST_DOT = 16
"""Minimum number of rows of a tile that tensor cores multiply."""
PROGRAMS_PER_SM, NARROW_PROGRAMS_PER_SM = 2, 4
"""Number of programs per multiprocessor; the second number is for `NARROW_TILE`.

With more programs, some of the next call would start before this call has ended, and overload some multiprocessors.
"""
ROUNDS = 2
"""Factor on the number of programs if there are enough rows: multiprocessors that finish early run another program."""
NEARLY = 15 / 16
"""Minimum fraction of the programs that must remain when their number is rounded to a multiple of the number of rows.

If fewer would remain, the number is not rounded. With a multiple, rows of equal length are divided evenly.
"""
MOST_SPLITS = 32
"""Maximum number of splits of a row: with more, the merge by the last program takes longer than the splits save."""
MOST_GROUP_SPLITS, LEAST_GROUP_TILES = 16, 4
"""Maximum number of splits, and minimum number of tiles of a range, for a group of several rows.

The program that merges the results of a group has several times as much to merge as that of a single row.
"""
GROUP_TILE_MAX = 32
"""Maximum number of queries in a group's tile: larger ones need too many registers for two programs."""
GROUP_ROWS_MAX = 8
"""The maximum number of rows of a group: those of a request with seven draft tokens."""
EXACT_SPLITS, EXACT_TOKENS = 8, 512
"""Number of splits and minimum number of tokens of a range in float32; they do not depend on the batch."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a call: tokens of a tile, warps, pipeline stages, and either `units` or `splits`."""

    block_tokens: int
    warps: int
    stages: int
    units: int = 0
    """Number of programs that share the tiles of all rows; 0 = each row has its own programs."""
    splits: int = 1
    """Number of programs of each row."""
    least_tiles: int = 1
    """Minimum number of tiles in a range of a row that is split."""
    shared_percent: int = 0
    """Percentage of a multiprocessor's L1 memory to use as shared memory (see `prefer_shared_memory`); 0 = default."""

    def partials(self, rows: int) -> int:
        """Return the maximum number of partial results per key head of `rows` rows."""
        return self.units + rows if self.units else self.splits * rows


SMALL_TILE = Plan(block_tokens=32, warps=2, stages=4, shared_percent=50)
"""The tile for few rows: it is small, so that its load takes little time.

With half of a multiprocessor's memory as shared memory, the kernels before and after, which use the other half, can run
at the same time.
"""
LARGE_TILE = Plan(block_tokens=128, warps=4, stages=2)
"""The tile for many rows; it takes so few registers that `PROGRAMS_PER_SM` programs fit on a multiprocessor."""
ROUNDS_TILE = Plan(block_tokens=64, warps=4, stages=3, shared_percent=72)
"""The tile with `ROUNDS`: 164 of 228 KiB are shared memory, which fits `PROGRAMS_PER_SM` programs of 64 KiB each."""
LARGE_TILE_DIMS = 128
"""Maximum head dim with which `LARGE_TILE` and `ROUNDS_TILE` fit into shared memory."""
WIDE_TILE = Plan(block_tokens=32, warps=4, stages=2)
"""The tile of heads of more than `WIDE_DIMS` dimensions: two stages of 512 dimensions take 128 KiB of shared memory."""
WIDE_DIMS = 256
NARROW_TILE = Plan(block_tokens=64, warps=2, stages=3)
"""The tile for many rows of narrow heads, whose keys and values take fewer bytes."""
NARROW_DIMS = 64
"""Maximum head dim of narrow heads."""

CODE_TILES = {
    SMALL_TILE: Plan(block_tokens=64, warps=4, stages=3, shared_percent=50),
    LARGE_TILE: Plan(block_tokens=128, warps=4, stages=3),
    ROUNDS_TILE: Plan(block_tokens=128, warps=4, stages=3, shared_percent=72),
    NARROW_TILE: Plan(block_tokens=128, warps=2, stages=3),
}
"""For each tile, the tile used instead for 8-bit keys and values, which loads about as many bytes at a time."""
ONE_ROW_CODE_TILE = Plan(block_tokens=64, warps=2, stages=4, shared_percent=50)
"""The tile for one row over 8-bit keys and values.

It takes 8.0 µs instead of 10.7 for 1,024 tokens of a layer of an 8B model.
"""

PlanFunction = Callable[[int, int, int, int, torch.dtype, int], Plan]
"""The type of `make_plan` and of functions that replace it."""


def make_plan(rows: int, kv_heads: int, head_dim: int, capacity: int, dtype: torch.dtype, sms: int) -> Plan:
    """Return the plan of `rows` rows that see at most `capacity` tokens, on a GPU of `sms` multiprocessors.

    `dtype` is that of the cache, or float32 if queries are float32. In float32, rows are split the same way in every
    batch, so that a row's bits do not depend on the other rows.
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
    if head_dim > WIDE_DIMS:
        tile = WIDE_TILE
    elif dtype.itemsize == 1:
        tile = ONE_ROW_CODE_TILE if rows == 1 else CODE_TILES[tile]
    most = min(MOST_SPLITS, -(-capacity // tile.block_tokens))
    if rows == 1:
        return replace(tile, splits=min(resident, most))
    whole = resident // rows * rows
    return replace(tile, units=min(whole if whole >= NEARLY * resident else resident, rows * most))


def group_rows(shapes: Iterable[AttentionShape], drafts: int) -> int:
    """Return the maximum number of rows of a group (`DraftGroups`) in steps of up to `drafts` draft tokens a request.

    A group's tile has LEAST_DOT queries if those of all rows of a request fit, else `GROUP_TILE_MAX`. Returns 1 if the
    query heads of one key head fill the tile, or if there are no shapes.
    """
    heads = max((1 << (shape.heads // shape.kv_heads - 1).bit_length() for shape in shapes), default=GROUP_TILE_MAX)
    tile = LEAST_DOT if (drafts + 1) * heads <= LEAST_DOT else GROUP_TILE_MAX
    return max(1, min(GROUP_ROWS_MAX, tile // heads))


def make_group_plan(rows: int, kv_heads: int, head_dim: int, capacity: int, dtype: torch.dtype, sms: int) -> Plan:
    """Return the plan of a call with `rows` groups, see `make_plan`; in float32 the plan is that of `make_plan`.

    A group's tile of queries is larger, so `SMALL_TILE` gets more warps, and `ROUNDS_TILE` replaces `LARGE_TILE`, which
    would run out of registers.
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
