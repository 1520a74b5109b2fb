"""Plans of absorbed attention: the tile of a program, and the number of programs; needs no Triton."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tandem.engine.config.attention import LatentShape

EXACT_SPLITS, EXACT_TOKENS = 8, 512
"""Number of splits of a group and minimum number of tokens of a range in float32; they do not depend on the batch."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The tile of a program, and the number of programs that share all tiles of a step."""

    rows: int
    """Number of rows of the tile: (token, head) pairs of one token, or of consecutive tokens of one row of the step."""
    block_tokens: int
    warps: int
    stages: int
    programs: int = 0
    """Number of programs that run concurrently; 0 = each group alone is cut into `EXACT_SPLITS` ranges."""


_TILES = {
    16: Plan(16, block_tokens=32, warps=4, stages=3, programs=2),
    32: Plan(32, block_tokens=32, warps=4, stages=3, programs=2),
    64: Plan(64, block_tokens=64, warps=8, stages=2, programs=1),
}
"""Tiles by their number of rows; `programs` is the number per multiprocessor.

A tile of 32 tokens of 576 bfloat16 values is 36 KiB. Each of two programs loads two tiles while it computes another
one: the 73 KiB that are always in flight saturate the memory, and 2 · 91 KiB fit into shared memory. 64 rows use the
tensor cores of four warps together, which need tiles of 64 tokens; one such program fits.
"""

PlanFunction = Callable[[LatentShape, int, torch.dtype, int], Plan]
"""The type of `make_plan` and of functions that replace it."""


def make_plan(shape: LatentShape, tokens: int, dtype: torch.dtype, sms: int) -> Plan:
    """Return the plan for groups of `tokens` tokens on a GPU of `sms` multiprocessors.

    Groups of float32 are split the same way in every batch, so that a row's bits do not depend on the other rows.
    """
    if dtype == torch.float32:
        return Plan(16, block_tokens=16, warps=4, stages=2)
    rows = next((rows for rows in _TILES if shape.heads * tokens <= rows), max(_TILES))
    tile = _TILES[rows]
    return Plan(tile.rows, tile.block_tokens, tile.warps, tile.stages, tile.programs * sms)


def group_tokens(shape: LatentShape) -> int:
    """Return the number of consecutive tokens in a group: as many as fit with all heads into the largest tile, or 1."""
    return max(1, max(_TILES) // shape.heads)


def absorbed_tokens(shape: LatentShape) -> int:
    """Return the maximum number of tokens of a row for which absorbed attention needs less arithmetic than expanded.

    Expanded attention first computes keys and values from each latent, which takes latent · (nope + v_dim) products per
    head. Then each query token takes query + v_dim products instead of 2 · latent + rope. The result is 170 for
    DeepSeek's dimensions.
    """
    return shape.latent * (shape.nope + shape.v_dim) // (2 * shape.latent + shape.rope - shape.query - shape.v_dim)
