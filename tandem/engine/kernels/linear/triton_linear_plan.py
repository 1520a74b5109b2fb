"""The tile of each weight-streaming product: a measured one for some shapes, a rule for all others.

The measured tiles are in `triton_linear_tiles.py`. Nothing here needs torch or Triton.
"""

from dataclasses import replace
from functools import lru_cache

from tandem.engine.kernels.linear.triton_linear_tiles import STREAMED_TOKENS, TUNED, Gemv, Skinny, Tile

TOKEN_TILES = (16, 32, 64, 128)
"""Possible numbers of tokens in a tile of the skinny product."""

SCRATCH_FLOATS = 1 << 23
"""Maximum number of partial sums that all split programs of one launch write: 32 MiB of float32."""

SCRATCH_COUNTERS = 1 << 14
"""Maximum number of output tiles of a split launch."""

DEFAULT_STREAMED_TOKENS = 16
"""Maximum number of tokens for which the streaming products are used, for shapes that were not measured."""

FLOAT_STREAMED_TOKENS = 256
"""Maximum number of tokens for which the streaming products are used in float32.

In float32 a single order of accumulation for all batch sizes matters more than speed.
"""

FUSED_NORM_TOKENS = 16
"""Maximum number of tokens of a step for which the product's kernel also computes the norm.

In larger steps a separate kernel is faster, because scaling the input would delay the tensor cores.
"""

MULTIPROCESSORS = 132
"""Number of multiprocessors of an H100 or H200, for which the tiles are chosen."""
EARLY_BYTES = 512
"""Number of bytes of each weight row that are prefetched into L2 before the input is ready."""
_MOST_SPLITS = 8
_FLOATS_PER_ROW_TILE = 16
"""Number of tokens of a float32 tile in every step, so that a token's sums never depend on the other tokens."""


def streams(tokens: int, n: int, k: int, item_bytes: int) -> bool:
    """Return True if the streaming products are used instead of cuBLAS for `tokens` tokens and a weight [n, k].

    They are used where they are faster, and in float32 for up to `FLOAT_STREAMED_TOKENS` tokens.
    """
    if item_bytes == 4:
        return tokens <= FLOAT_STREAMED_TOKENS
    return tokens <= STREAMED_TOKENS.get((n, k), DEFAULT_STREAMED_TOKENS)


@lru_cache(maxsize=4096)
def tile_for(tokens: int, n: int, k: int, paired: bool, item_bytes: int) -> Tile:
    """Return the tile for a step of `tokens` tokens and a weight [n, k] of `item_bytes` bytes per element.

    `paired` is True if the rows are gate and up.
    """
    if item_bytes == 4:
        return _float_tile(k, paired)
    bucket = 1 if tokens == 1 else next((tile for tile in TOKEN_TILES if tokens <= tile), TOKEN_TILES[-1])
    tuned = TUNED.get((n, k, paired), {}).get(bucket)
    if tuned is not None and tokens <= TOKEN_TILES[-1]:
        return tuned
    outputs = n // 2 if paired else n
    return _gemv(outputs, k, paired) if bucket == 1 else _skinny(tokens, bucket, outputs, k, paired)


def _gemv(outputs: int, k: int, paired: bool) -> Gemv:
    """Return a tile of all k columns if k ≤ 4096, so that a program loads all its weights before the input is ready."""
    columns = min(_power_above(k), 4096 if k <= 4096 else 2048)
    warps = 8 if columns == 4096 and outputs >= 4096 else 4
    numbers = 8192 * warps // 4
    rows = max(1, numbers // columns // (2 if paired else 1))
    while rows > 1 and outputs < rows * 3 * MULTIPROCESSORS:
        rows //= 2
    return Gemv(rows, columns, warps)


def _skinny(tokens: int, bucket: int, outputs: int, k: int, paired: bool) -> Skinny:
    """Return a tile for two programs per multiprocessor, each with 48 KiB or more of loads in flight."""
    wide = bucket >= 64
    rows, columns, stages = (128, 64, 4 if bucket == 64 else 3) if wide else (64, 128, 4)
    if paired or outputs < 128 * MULTIPROCESSORS // 8:
        rows = 64
        stages = 3
    columns = min(columns, max(16, _power_above(k)))
    tiles = -(-outputs // rows) * -(-tokens // bucket)
    tile = Skinny(rows, bucket, columns, 1, stages, 8 if bucket == 128 else 4, early=EARLY_BYTES)
    return with_splits(tile, tiles, k, paired, programs=3 * MULTIPROCESSORS // 2, least_columns=4 * columns)


def with_splits(tile: Skinny, tiles: int, k: int, paired: bool, *, programs: int, least_columns: int) -> Skinny:
    """Return the tile with the k input columns of each of `tiles` output tiles divided among several programs.

    The number of splits doubles until there are `programs` programs, as long as it is at most k / `least_columns` and
    `_MOST_SPLITS`, and the partial sums fit the scratch memory.
    """
    splits = 1
    while tiles * splits < programs and k >= splits * least_columns and splits < _MOST_SPLITS:
        splits *= 2
    while not fits_scratch(tile := replace(tile, splits=splits), tiles, paired):
        splits //= 2
    return tile


def fits_scratch(tile: Skinny, tiles: int, paired: bool) -> bool:
    """Return True if the partial sums of `tiles` output tiles (two sets if `paired`) fit the scratch memory."""
    floats = tile.tokens * (tile.rows * (2 if paired else 1) + 1)
    return tile.splits == 1 or (tiles <= SCRATCH_COUNTERS and tiles * tile.splits * floats <= SCRATCH_FLOATS)


def _float_tile(k: int, paired: bool) -> Skinny:
    """Return the tile for float32 elements.

    It does not depend on the step's number of tokens: see `_FLOATS_PER_ROW_TILE`.
    """
    columns = min(32, max(16, _power_above(k)))
    return Skinny(16 if paired else 32, _FLOATS_PER_ROW_TILE, columns, splits=1, stages=3, warps=4)


def _power_above(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()
