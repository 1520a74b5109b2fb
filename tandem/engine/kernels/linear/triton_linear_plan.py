"""The tile of each weight-streaming product: a measured one for some shapes, a rule for all others.

The measured tiles are in `triton_linear_tiles.py`. Nothing here needs torch or Triton.
"""

from functools import lru_cache

from tandem.engine.kernels.linear.triton_linear_tiles import STREAMED_TOKENS, TUNED, Gemv, Skinny, Tile

TOKEN_TILES = (16, 32, 64, 128)
"""The numbers of tokens that a tile of the skinny product may hold."""

SCRATCH_FLOATS = 1 << 23
"""Partial sums that all split programs of one launch may write together: 32 MiB of float32."""

SCRATCH_COUNTERS = 1 << 14
"""The maximum number of output tiles of one split launch."""

DEFAULT_STREAMED_TOKENS = 16
"""The largest step, in tokens, that is streamed for shapes that were not measured."""

FLOAT_STREAMED_TOKENS = 256
"""The largest step, in tokens, that is streamed in float32.

There a single order of accumulation for every batch size matters more than speed.
"""

FUSED_NORM_TOKENS = 16
"""The largest step, in tokens, whose norm is cheaper inside the product.

In larger steps, scaling the input delays the matrix units.
"""

MULTIPROCESSORS = 132
"""Multiprocessors of an H100 or H200, for which the tiles are chosen."""
_FLOATS_PER_ROW_TILE = 16
"""Tokens of a float32 tile in every step, so that a row's sums never depend on the other rows."""


def streams(tokens: int, n: int, k: int, item_bytes: int) -> bool:
    """Return True if these products are faster than cuBLAS for `tokens` tokens and a weight [n, k].

    In float32 they are used for another reason, see `FLOAT_STREAMED_TOKENS`.
    """
    if item_bytes == 4:
        return tokens <= FLOAT_STREAMED_TOKENS
    return tokens <= STREAMED_TOKENS.get((n, k), DEFAULT_STREAMED_TOKENS)


@lru_cache(maxsize=4096)
def tile_for(tokens: int, n: int, k: int, paired: bool, item_bytes: int) -> Tile:
    """Return the tile for a step of `tokens` tokens and a weight [n, k] of `item_bytes` per element.

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
    """Return a tile of all columns up to 4096: a program's whole weight is in flight before the input is ready."""
    columns = min(_power_above(k), 4096 if k <= 4096 else 2048)
    warps = 8 if columns == 4096 and outputs >= 4096 else 4
    numbers = 8192 * warps // 4
    rows = max(1, numbers // columns // (2 if paired else 1))
    while rows > 1 and outputs < rows * 3 * MULTIPROCESSORS:
        rows //= 2
    return Gemv(rows, columns, warps)


def _skinny(tokens: int, bucket: int, outputs: int, k: int, paired: bool) -> Skinny:
    """Return a tile with two programs per multiprocessor, each with 48 KiB or more in flight."""
    wide = bucket >= 64
    rows, columns, stages = (128, 64, 4 if bucket == 64 else 3) if wide else (64, 128, 4)
    if paired or outputs < 128 * MULTIPROCESSORS // 8:
        rows = 64
        stages = 3
    columns = min(columns, max(16, _power_above(k)))
    tiles = -(-outputs // rows) * -(-tokens // bucket)
    splits = 1
    while tiles * splits < 3 * MULTIPROCESSORS // 2 and k >= splits * 2 * 2 * columns and splits < 8:
        splits *= 2
    warps = 8 if bucket == 128 else 4
    while not fits_scratch(tile := Skinny(rows, bucket, columns, splits, stages, warps, early=512), tiles, paired):
        splits //= 2
    return tile


def fits_scratch(tile: Skinny, tiles: int, paired: bool) -> bool:
    """Return True if the partial sums of `tiles` output tiles (two sets if `paired`) fit the scratch memory."""
    floats = tile.tokens * (tile.rows * (2 if paired else 1) + 1)
    return tile.splits == 1 or (tiles <= SCRATCH_COUNTERS and tiles * tile.splits * floats <= SCRATCH_FLOATS)


def _float_tile(k: int, paired: bool) -> Skinny:
    """Return the tile of float32, which is the same for every step: see `_FLOATS_PER_ROW_TILE`."""
    columns = min(32, max(16, _power_above(k)))
    return Skinny(16 if paired else 32, _FLOATS_PER_ROW_TILE, columns, splits=1, stages=3, warps=4)


def _power_above(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()
