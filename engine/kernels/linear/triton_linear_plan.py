"""Which tile each weight-streaming product runs with: measured ones by shape, a rule for all others.

The measured ones stand in `triton_linear_tiles.py`. No torch, no Triton.
"""

from functools import lru_cache

from engine.kernels.linear.triton_linear_tiles import STREAMED_TOKENS, TUNED, Gemv, Skinny, Tile

TOKEN_TILES = (16, 32, 64, 128)
"""Numbers of tokens that a tile of the skinny product may hold."""

SCRATCH_FLOATS = 1 << 23
"""Partial sums that all split programs of one launch may write together: 32 MiB of float32."""

SCRATCH_COUNTERS = 1 << 14
"""Output tiles that one split launch may have."""

DEFAULT_STREAMED_TOKENS = 16
"""Of shapes that were not measured."""

FLOAT_STREAMED_TOKENS = 256
"""Of float32, where one order of sums for every size of batch counts more than speed."""

FUSED_NORM_TOKENS = 16
"""Largest step whose norm is cheaper inside the product: beyond, scaling the input holds up the matrix units."""

_MULTIPROCESSORS = 132
_FLOATS_PER_ROW_TILE = 16
"""Tokens a float32 tile holds, whatever the step: so a row's sums never depend on the other rows."""


def streams(tokens: int, n: int, k: int, item_bytes: int) -> bool:
    """Whether these products beat cuBLAS for so many tokens and a weight [n, k] of `item_bytes` a number."""
    if item_bytes == 4:
        return tokens <= FLOAT_STREAMED_TOKENS
    return tokens <= STREAMED_TOKENS.get((n, k), DEFAULT_STREAMED_TOKENS)


@lru_cache(maxsize=4096)
def tile_for(tokens: int, n: int, k: int, paired: bool, item_bytes: int) -> Tile:
    """The tile for a step of `tokens` and a weight [n, k] of `item_bytes` a number; `paired`: rows are gate and up."""
    if item_bytes == 4:
        return _float_tile(k, paired)
    bucket = 1 if tokens == 1 else next((tile for tile in TOKEN_TILES if tokens <= tile), TOKEN_TILES[-1])
    tuned = TUNED.get((n, k, paired), {}).get(bucket)
    if tuned is not None and tokens <= TOKEN_TILES[-1]:
        return tuned
    outputs = n // 2 if paired else n
    return _gemv(outputs, k, paired) if bucket == 1 else _skinny(tokens, bucket, outputs, k, paired)


def _gemv(outputs: int, k: int, paired: bool) -> Gemv:
    """All columns at once up to 4096, so that a program's whole weight is on its way before the input is ready."""
    columns = min(_power_above(k), 4096 if k <= 4096 else 2048)
    warps = 8 if columns == 4096 and outputs >= 4096 else 4
    numbers = 8192 * warps // 4
    rows = max(1, numbers // columns // (2 if paired else 1))
    while rows > 1 and outputs < rows * 3 * _MULTIPROCESSORS:
        rows //= 2
    return Gemv(rows, columns, warps)


def _skinny(tokens: int, bucket: int, outputs: int, k: int, paired: bool) -> Skinny:
    """Two programs a multiprocessor, each with 48 KiB or more on its way."""
    wide = bucket >= 64
    rows, columns, stages = (128, 64, 4 if bucket == 64 else 3) if wide else (64, 128, 4)
    if paired or outputs < 128 * _MULTIPROCESSORS // 8:
        rows = 64
        stages = 3
    columns = min(columns, max(16, _power_above(k)))
    tiles = -(-outputs // rows) * -(-tokens // bucket)
    splits = 1
    while tiles * splits < 3 * _MULTIPROCESSORS // 2 and k >= splits * 2 * 2 * columns and splits < 8:
        splits *= 2
    warps = 8 if bucket == 128 else 4
    while not fits_scratch(tile := Skinny(rows, bucket, columns, splits, stages, warps, early=512), tiles, paired):
        splits //= 2
    return tile


def fits_scratch(tile: Skinny, tiles: int, paired: bool) -> bool:
    """Whether the partial sums of `tiles` output tiles, two sets where `paired`, and their counters have room."""
    floats = tile.tokens * (tile.rows * (2 if paired else 1) + 1)
    return tile.splits == 1 or (tiles <= SCRATCH_COUNTERS and tiles * tile.splits * floats <= SCRATCH_FLOATS)


def _float_tile(k: int, paired: bool) -> Skinny:
    """The same for every step: see `_FLOATS_PER_ROW_TILE`."""
    columns = min(32, max(16, _power_above(k)))
    return Skinny(16 if paired else 32, _FLOATS_PER_ROW_TILE, columns, splits=1, stages=3, warps=4)


def _power_above(number: int) -> int:
    """The least power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()
