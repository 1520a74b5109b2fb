"""The tile of each product of 8-bit weights and 8-bit inputs: a measured one for some shapes, a rule for all others.

Nothing here needs torch or Triton.
"""

from functools import lru_cache

from tandem.engine.kernels.linear.triton_linear_plan import EARLY_BYTES, MULTIPROCESSORS, TOKEN_TILES, with_splits
from tandem.engine.kernels.linear.triton_linear_tiles import Shape, Skinny, Tile

TUNED: dict[Shape, dict[int, Tile]] = {
    (6144, 4096, False): {
        16: Skinny(rows=64, tokens=16, columns=256, splits=2, stages=4, warps=4, early=512),
        32: Skinny(rows=64, tokens=32, columns=256, splits=2, stages=4, warps=4, early=512),
    },
    (4096, 4096, False): {
        16: Skinny(rows=64, tokens=16, columns=256, splits=4, stages=4, warps=4, early=512),
        32: Skinny(rows=64, tokens=32, columns=256, splits=4, stages=4, warps=4, early=512),
        64: Skinny(rows=64, tokens=64, columns=256, splits=2, stages=4, warps=4, early=512),
    },
}
"""Measured tiles by shape and maximum number of tokens, for weights with one scale per row; others follow the rule.

A tile for 1 is used for exactly one token of FP8 codes.

From `python -m benchmarks.kernels products --forms scaled-fp8 --candidates` on an H200, in µs by the rule and with
these tiles: [6144, 4096] 11.4 and 10.8 for 8 tokens, 12.4 and 11.0 for 32; [4096, 4096] 9.6 and 8.1, 10.8 and 9.4, and
10.8 and 9.6 for 64.
"""
_STEP = 128


@lru_cache(maxsize=4096)
def tile_for(tokens: int, n: int, k: int, paired: bool, group: int) -> Tile:
    """Return the tile for a step of `tokens` tokens, n outputs and k columns, `group` of which share a scale.

    The rule follows from measurements with llama-3-8b on an H100: six stages, and for more than 32 tokens only as many
    splits as are needed to keep two thirds of the multiprocessors busy.
    """
    grouped = group < k
    columns = min(_STEP, group) if grouped else _STEP
    # The registers of eight warps hold the sums of 256 tokens; with groups, a group's own sums take the place of half
    # of them.
    bucket = next((size for size in TOKEN_TILES if tokens <= size), 128 if grouped else 256)
    of_shape = TUNED.get((2 * n if paired else n, k, paired), {})
    tuned = of_shape.get(tokens if tokens == 1 else bucket, of_shape.get(bucket))
    if tuned is not None and not grouped and tokens <= bucket:
        return tuned
    if bucket == 256:
        return Skinny(64 if paired else 128, bucket, columns, splits=1, stages=4, warps=8)
    rows, warps, stages = 64, 4, 6
    if paired:  # twice the rows; two programs with up to 32 tokens, or with 128, fit on a multiprocessor
        warps, stages = (8, 3) if bucket == 128 else (4, 5)
    tiles = -(-n // rows) * -(-tokens // bucket)
    least = 3 * MULTIPROCESSORS // 2 if bucket <= 32 else 2 * MULTIPROCESSORS // 3
    tile = Skinny(rows, bucket, columns, 1, stages, warps, early=EARLY_BYTES if tokens <= bucket else 0)
    return with_splits(tile, tiles, k, paired, programs=least, least_columns=4 * _STEP)
