"""How a call of decode attention is cut up, by rows, heads and GPU: tiles, and programs that run at a time.

Measured in whole steps, see docs/decisions/0006-gpu-decode-step.md. No Triton.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

LEAST_DOT = 16
"""Fewest rows of a tile that the matrix units take."""
PROGRAMS_PER_SM, NARROW_PROGRAMS_PER_SM = 2, 4
"""Programs that have room at a time, the second with `NARROW_TILE`. With room for more, those of the next call would
come in before this one's have ended, and leave some multiprocessors with too many.
"""
ROUNDS = 2
"""Times as many programs, where there are rows for each: a multiprocessor that is done sooner takes one more."""
NEARLY = 15 / 16
"""Part of these at which there are as many as divide rows of one length evenly: the others would have nothing to do."""
MOST_SPLITS = 32
"""More make a row no faster, as its last program has to merge them."""
EXACT_SPLITS, EXACT_TOKENS = 8, 512
"""Splits and shortest stretch of float32, whatever the batch."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How a call is cut up: tokens of a tile, warps, pipeline stages, and either `units` or `splits`."""

    block_tokens: int
    warps: int
    stages: int
    units: int = 0
    """Programs that walk over all rows; 0 = each row has its own."""
    splits: int = 1
    """Programs of each row."""
    least_tiles: int = 1
    """Tiles of the shortest stretch of a row that is split."""
    shared_percent: int = 0
    """Part of a multiprocessor's memory that it wants as shared memory (see `prefer_shared_memory`); 0 = no wish."""

    def partials(self, rows: int) -> int:
        """Partial results that `rows` rows have room for, of each key head."""
        return self.units + rows if self.units else self.splits * rows


SMALL_TILE = Plan(block_tokens=32, warps=2, stages=4, shared_percent=50)
"""Few rows: small tiles are on their way soonest, and the kernels around them count: half of the memory as shared
memory lets those run beside it, as theirs is the other half.
"""
LARGE_TILE = Plan(block_tokens=128, warps=4, stages=2)
"""Many rows: its registers leave room for `PROGRAMS_PER_SM`."""
ROUNDS_TILE = Plan(block_tokens=64, warps=4, stages=3, shared_percent=72)
"""Rows for `ROUNDS`: of 228 KiB it gets 164, so there is room for `PROGRAMS_PER_SM` of 64 KiB each."""
LARGE_TILE_DIMS = 128
"""Largest head dim of which these two fit into shared memory."""
NARROW_TILE = Plan(block_tokens=64, warps=2, stages=3)
"""The same of narrow heads, whose tiles are smaller."""
NARROW_DIMS = 64
"""Largest head dim of narrow heads."""

PlanFunction = Callable[[int, int, int, int, torch.dtype, int], Plan]
"""`make_plan` or a stand-in for it."""


def make_plan(rows: int, kv_heads: int, head_dim: int, capacity: int, dtype: torch.dtype, sms: int) -> Plan:
    """The plan of `rows` rows of at most `capacity` seen tokens on a GPU of `sms` multiprocessors.

    float32 is cut the same way whatever the batch, so that a row's bits do not depend on the rows beside it.
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
    most = min(MOST_SPLITS, -(-capacity // tile.block_tokens))
    if rows == 1:
        return replace(tile, splits=min(resident, most))
    whole = resident // rows * rows
    return replace(tile, units=min(whole if whole >= NEARLY * resident else resident, rows * most))
