"""The tile of each product with a packed weight: a measured one for some shapes, a rule for all others.

Nothing here needs torch or Triton.
"""

from functools import lru_cache

from tandem.engine.kernels.linear.triton_linear_plan import EARLY_BYTES, MULTIPROCESSORS, TOKEN_TILES, with_splits
from tandem.engine.kernels.linear.triton_linear_tiles import Skinny
from tandem.engine.kernels.packed_weight import TILE

TUNED: dict[tuple[int, int, int, bool], dict[int, Skinny]] = {
    (8, 6144, 4096, False): {
        16: Skinny(rows=64, tokens=16, columns=128, splits=4, stages=6, warps=4, early=512),
        32: Skinny(rows=64, tokens=32, columns=128, splits=4, stages=5, warps=4, early=512),
        64: Skinny(rows=64, tokens=64, columns=128, splits=4, stages=3, warps=4, early=512),
        128: Skinny(rows=64, tokens=128, columns=128, splits=2, stages=3, warps=4, early=512),
    },
    (4, 6144, 4096, False): {
        16: Skinny(rows=128, tokens=16, columns=64, splits=8, stages=4, warps=4, early=512),
        32: Skinny(rows=128, tokens=32, columns=64, splits=4, stages=4, warps=4, early=512),
        64: Skinny(rows=64, tokens=64, columns=64, splits=4, stages=3, warps=4, early=512),
        128: Skinny(rows=64, tokens=128, columns=64, splits=2, stages=3, warps=4, early=512),
    },
    (8, 4096, 4096, False): {
        16: Skinny(rows=64, tokens=16, columns=128, splits=8, stages=5, warps=4, early=512),
        32: Skinny(rows=64, tokens=32, columns=128, splits=4, stages=6, warps=4, early=512),
        64: Skinny(rows=64, tokens=64, columns=128, splits=4, stages=4, warps=4, early=512),
        128: Skinny(rows=64, tokens=128, columns=128, splits=4, stages=3, warps=4, early=512),
    },
    (4, 4096, 4096, False): {
        16: Skinny(rows=128, tokens=16, columns=64, splits=8, stages=4, warps=8, early=512),
        32: Skinny(rows=128, tokens=32, columns=64, splits=8, stages=4, warps=8, early=512),
        64: Skinny(rows=128, tokens=64, columns=64, splits=4, stages=4, warps=8, early=512),
        128: Skinny(rows=128, tokens=128, columns=64, splits=4, stages=3, warps=8, early=512),
    },
    (8, 28672, 4096, True): {
        16: Skinny(rows=64, tokens=16, columns=128, splits=1, stages=5, warps=4, early=512),
        32: Skinny(rows=64, tokens=32, columns=128, splits=1, stages=4, warps=4, early=512),
        64: Skinny(rows=64, tokens=64, columns=128, splits=1, stages=4, warps=4, early=512),
        128: Skinny(rows=128, tokens=128, columns=128, splits=2, stages=3, warps=8, early=512),
    },
    (4, 28672, 4096, True): {
        16: Skinny(rows=128, tokens=16, columns=64, splits=2, stages=4, warps=4, early=512),
        32: Skinny(rows=64, tokens=32, columns=64, splits=1, stages=6, warps=4, early=512),
        64: Skinny(rows=64, tokens=64, columns=64, splits=1, stages=4, warps=4, early=512),
        128: Skinny(rows=64, tokens=128, columns=64, splits=1, stages=3, warps=8, early=512),
    },
    (8, 4096, 14336, False): {
        16: Skinny(rows=64, tokens=16, columns=128, splits=8, stages=4, warps=4, early=512),
        32: Skinny(rows=64, tokens=32, columns=128, splits=4, stages=6, warps=4, early=512),
        64: Skinny(rows=64, tokens=64, columns=128, splits=4, stages=4, warps=4, early=512),
        128: Skinny(rows=128, tokens=128, columns=128, splits=4, stages=4, warps=8, early=512),
    },
    (4, 4096, 14336, False): {
        16: Skinny(rows=128, tokens=16, columns=64, splits=8, stages=4, warps=8, early=512),
        32: Skinny(rows=128, tokens=32, columns=64, splits=8, stages=4, warps=8, early=512),
        64: Skinny(rows=128, tokens=64, columns=64, splits=4, stages=4, warps=8, early=512),
        128: Skinny(rows=128, tokens=128, columns=64, splits=4, stages=4, warps=8, early=512),
    },
    (8, 128256, 4096, False): {
        16: Skinny(rows=64, tokens=16, columns=128, splits=1, stages=4, warps=4, early=512),
        32: Skinny(rows=128, tokens=32, columns=128, splits=1, stages=4, warps=4, early=512),
        64: Skinny(rows=128, tokens=64, columns=128, splits=1, stages=4, warps=8, early=512),
        128: Skinny(rows=128, tokens=128, columns=128, splits=1, stages=4, warps=8, early=512),
    },
    (4, 128256, 4096, False): {
        16: Skinny(rows=128, tokens=16, columns=64, splits=1, stages=4, warps=8, early=512),
        32: Skinny(rows=128, tokens=32, columns=64, splits=1, stages=4, warps=4, early=512),
        64: Skinny(rows=128, tokens=64, columns=64, splits=1, stages=3, warps=4, early=512),
        128: Skinny(rows=128, tokens=128, columns=64, splits=1, stages=4, warps=8, early=512),
    },
}
"""Measured tiles by (bits, rows, columns, True if the rows are gate and up) of the weight and maximum number of tokens.

From `python -m benchmarks.kernels products --candidates` for llama-3-8b on an H100: 8-bit codes with one scale per row,
and 4-bit codes with one scale per 128 columns of a row.
"""
_WIDEST = {8: TILE, 4: TILE // 2}
"""For each number of bits of a code: the number of bytes of codes that a measured tile reads at a time."""
_PROGRAMS = 4 * MULTIPROCESSORS
"""Target number of programs of a product with enough tiles: several per multiprocessor.

So some programs of a multiprocessor compute while others wait for their loads.
"""


@lru_cache(maxsize=4096)
def tile_for(tokens: int, n: int, k: int, paired: bool, bits: int, columns: int) -> Skinny:
    """Return the tile for a step of `tokens` tokens and a weight [n, k].

    `columns` is `step_bytes` of the weight. `paired` is True if the rows are gate and up.
    """
    bucket = next((size for size in TOKEN_TILES if tokens <= size), TOKEN_TILES[-1])
    tuned = TUNED.get((bits, n, k, paired), {}).get(bucket)
    if tuned is not None and tokens <= TOKEN_TILES[-1] and columns == _WIDEST[bits]:
        return tuned
    # With 128 tokens the registers of a warp hold the sums of 16 rows, or of 8 rows of gate and up.
    rows = 128 if bucket == TOKEN_TILES[-1] and not paired else 64
    warps, stages = (8, 3) if bucket == TOKEN_TILES[-1] else (4, 4 if bucket == 64 else 5)
    tiles = -(-(n // 2 if paired else n) // rows) * -(-tokens // bucket)
    programs = _PROGRAMS if bucket <= 32 and not paired else _PROGRAMS // 2
    tile = Skinny(rows, bucket, columns, 1, stages, warps, early=EARLY_BYTES)
    return with_splits(tile, tiles, k, paired, programs=2 * programs // 3, least_columns=8 * TILE)
