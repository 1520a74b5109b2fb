"""The tile of each product of a 4-bit weight and 8-bit inputs: a measured one for some shapes, a rule for all others.

Nothing here needs torch or Triton.
"""

from functools import lru_cache

from tandem.engine.kernels.linear.triton_linear_plan import EARLY_BYTES, MULTIPROCESSORS, TOKEN_TILES, with_splits
from tandem.engine.kernels.linear.triton_linear_tiles import Shape, Skinny
from tandem.engine.kernels.packed_weight import TILE

TUNED: dict[Shape, dict[int, Skinny]] = {}
"""Measured tiles by shape and by `bucket_of`.

From `python -m benchmarks.kernels products --candidates`, for weights with one scale per 128 columns of a row.
"""
LEAST_TOKENS: dict[tuple[int, int], tuple[int, int]] = {}
"""For (rows, columns) of a weight: the least tokens of a step with 8-bit inputs, and of one computed by the library.

`python -m benchmarks.kernels products --candidates` prints lines for it. It is empty until the present kernel has been
measured, so no product quantizes the inputs of 4-bit weights yet (docs/decisions/quantized_weights.md).
"""
_NEVER = 1 << 31
MANY_TOKENS = 256
"""The bucket of all steps that need several tiles of tokens."""


def bucket_of(tokens: int) -> int:
    """Return the number of tokens under which the table lists the tile of a step."""
    return next((size for size in TOKEN_TILES if tokens <= size), MANY_TOKENS)


def least_tokens(rows: int, columns: int) -> int:
    """Return the minimum number of tokens of a step that quantizes the inputs of a product."""
    return LEAST_TOKENS.get((rows, columns), (_NEVER, _NEVER))[0]


def library_tokens(rows: int, columns: int) -> int:
    """Return the minimum number of tokens of a step for which the library is faster than Triton, with 8-bit inputs."""
    return LEAST_TOKENS.get((rows, columns), (_NEVER, _NEVER))[1]


@lru_cache(maxsize=4096)
def tile_for(tokens: int, n: int, k: int, paired: bool) -> Skinny:
    """Return the tile for a step of `tokens` tokens and a weight [n, k]; `paired`: the rows are gate and up.

    Of gate and up of llama-3-8b on an H200, four warps take 117 µs with 256 tokens and 730 with 2,048, eight warps 162
    and 1,063.
    """
    bucket = bucket_of(tokens)
    tuned = TUNED.get((n, k, paired), {}).get(bucket)
    if tuned is not None:
        return tuned
    size = min(bucket, TOKEN_TILES[-1])
    rows, warps, stages = 64, 4, 4 if size <= 64 else 3
    tiles = -(-(n // 2 if paired else n) // rows) * -(-tokens // size)
    # With many tokens, joining splits takes longer than they save.
    programs = 2 * MULTIPROCESSORS if size <= 32 else 0
    tile = Skinny(rows, size, TILE, 1, stages, warps, early=EARLY_BYTES if tokens <= size else 0)
    return with_splits(tile, tiles, k, paired, programs=programs, least_columns=8 * TILE)
