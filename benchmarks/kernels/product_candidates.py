"""Candidate tiles for the weight-streaming products of a model, with bfloat16 or packed weights."""

import math
from collections.abc import Iterable, Iterator, Sequence

from benchmarks.kernels.dense_layer import Product
from tandem.engine.kernels.linear.triton_linear_plan import MULTIPROCESSORS, TOKEN_TILES, fits_scratch
from tandem.engine.kernels.linear.triton_linear_tiles import Gemv, Skinny, Tile
from tandem.engine.kernels.packed import w4a8_tiles
from tandem.engine.kernels.packed.packed_tiles import tile_for as packed_tile_for

_SHARED_MEMORY = 227 << 10
_SUMS_PER_WARP = 4096
"""float32 accumulators that fit into a warp's registers in addition to everything else: 128 per thread."""
_MOST_PROGRAMS = 6 * MULTIPROCESSORS
_SKINNY_TILES = {
    16: ((16, 256, 4, 4), (32, 128, 4, 4), (64, 128, 4, 4), (64, 256, 3, 4)),
    32: ((32, 128, 4, 4), (64, 128, 4, 4), (64, 64, 6, 4), (128, 64, 4, 8)),
    64: ((64, 128, 3, 4), (128, 64, 4, 4), (128, 64, 4, 8), (256, 64, 4, 8)),
    128: ((64, 64, 4, 4), (128, 64, 4, 8), (128, 128, 3, 8), (256, 64, 3, 8)),
}
"""Candidates for bfloat16, by tokens: (rows, columns, stages, warps)."""
_PACKED_TILES = {
    16: ((64, 4, 4), (64, 6, 4), (128, 4, 4), (128, 4, 8)),
    32: ((64, 4, 4), (64, 6, 4), (128, 4, 4), (128, 4, 8)),
    64: ((64, 3, 4), (64, 5, 4), (128, 3, 4), (128, 4, 8)),
    128: ((64, 3, 4), (64, 3, 8), (128, 3, 8), (128, 4, 8)),
}
"""Candidates for packed weights, by tokens: (rows, stages, warps)."""
_W4A8_TILES = {
    16: ((64, 16, 4, 4, 512), (64, 16, 6, 4, 2048), (128, 16, 6, 4, 2048)),
    32: ((64, 32, 4, 4, 512), (64, 32, 6, 4, 2048), (128, 32, 6, 4, 2048)),
    64: ((64, 64, 5, 4, 512), (64, 64, 4, 4, 2048), (64, 32, 4, 4, 512)),
    128: ((64, 128, 4, 4, 512), (64, 64, 4, 4, 512), (64, 64, 4, 4, 2048), (128, 64, 4, 8, 512)),
    256: ((64, 128, 3, 4, 0), (64, 64, 4, 4, 0), (64, 64, 4, 4, 512), (128, 64, 4, 8, 512)),
}
"""Candidates for 4-bit weights with 8-bit inputs, by tokens: (rows, tokens, stages, warps, bytes to prefetch)."""


def bucket_of(tokens: int) -> int:
    """Return the number of tokens of the tile that a step of `tokens` tokens uses."""
    return next((size for size in TOKEN_TILES if tokens <= size), TOKEN_TILES[-1])


def candidates(product: Product, tokens: int, early: Sequence[int]) -> list[Tile]:
    """Return candidate tiles for a bfloat16 weight; for one token `early` is ignored.

    For several tokens, each tile occurs once per number in `early`: the bytes of each weight row that are prefetched
    into L2.
    """
    if tokens == 1:
        return list(gemv_candidates(product))
    return [tile for ahead in early for tile in _skinny_candidates(product, tokens, ahead)]


def packed_candidates(product: Product, tokens: int, bits: int, columns: int) -> Iterator[Skinny]:
    """Yield the engine's tile for a packed weight, then others that load `columns` bytes of a row's codes at a time."""
    rule = packed_tile_for(tokens, product.n, product.k, product.paired, bits, columns)
    yield rule
    bucket, factor = bucket_of(tokens), 2 if product.paired else 1
    for rows, stages, warps in _PACKED_TILES[bucket]:
        inputs = 2 * bucket * columns * 8 // bits
        shared = (stages - 1) * (columns * rows * factor + inputs) + inputs
        if shared > _SHARED_MEMORY or rows * bucket * factor > _SUMS_PER_WARP * warps:
            continue
        tiles = math.ceil(product.outputs / rows) * math.ceil(tokens / bucket)
        for splits in splits_of(tiles, product.k * bits // 8 // columns):
            tile = Skinny(rows, bucket, columns, splits, stages, warps, early=512)
            if tile != rule and fits_scratch(tile, tiles, product.paired):
                yield tile


def w4a8_candidates(product: Product, tokens: int) -> Iterator[Skinny]:
    """Yield the engine's tile for a 4-bit weight and 8-bit inputs, then others."""
    rule = w4a8_tiles.tile_for(tokens, product.n, product.k, product.paired)
    yield rule
    factor = 2 if product.paired else 1
    for rows, size, stages, warps, early in _W4A8_TILES[w4a8_tiles.bucket_of(tokens)]:
        if rows * size * factor > 2 * _SUMS_PER_WARP * warps:  # besides the sums, registers hold a group's products
            continue
        tiles = math.ceil(product.outputs / rows) * math.ceil(tokens / size)
        splits_tried = [count for count in (1, 2, 4) if tiles * count <= 4 * MULTIPROCESSORS] or [1]
        if size <= TOKEN_TILES[1]:
            splits_tried = splits_of(tiles, product.k // rule.columns)[-2:]
        for splits in splits_tried:
            tile = Skinny(rows, size, rule.columns, splits, stages, warps, early)
            if tile != rule and fits_scratch(tile, tiles, product.paired):
                yield tile


def splits_of(tiles: int, steps: int) -> list[int]:
    """Return up to three numbers of splits that are tried for a product of `tiles` tiles and `steps` steps along K."""
    fitting = _splits(tiles, steps)
    return [s for s in fitting if s == fitting[-1] or tiles * s >= 0.9 * MULTIPROCESSORS][-3:]


def gemv_candidates(product: Product) -> Iterable[Gemv]:
    """Yield tiles for one token, whose threads hold 32 to 128 elements of the weight."""
    widest = 1 << (product.k - 1).bit_length()
    factor = 2 if product.paired else 1
    for warps in (2, 4, 8):
        for columns in (512, 1024, 2048, 4096):
            for rows in (1, 2, 4, 8, 16):
                held = rows * columns * factor / (32 * warps)
                programs = product.outputs / rows
                wide_loads = columns >= 256 * warps
                if columns <= widest and wide_loads and 32 <= held <= 128 and programs >= 2 * MULTIPROCESSORS:
                    yield Gemv(rows, columns, warps)


def _skinny_candidates(product: Product, tokens: int, early: int) -> Iterable[Skinny]:
    bucket, factor = bucket_of(tokens), 2 if product.paired else 1
    for rows, columns, stages, warps in _SKINNY_TILES[bucket]:
        shared = 2 * columns * (rows * factor + bucket) * stages
        if shared > _SHARED_MEMORY or rows * bucket * factor > _SUMS_PER_WARP * warps:
            continue
        tiles = math.ceil(product.outputs / rows)
        fitting = _splits(tiles, product.k // columns)
        full = [s for s in fitting if tiles * s >= 0.9 * MULTIPROCESSORS]
        for splits in full[:2] or fitting[-1:]:
            tile = Skinny(rows, bucket, columns, splits, stages, warps, early)
            if fits_scratch(tile, tiles, product.paired):
                yield tile


def _splits(tiles: int, steps: int) -> list[int]:
    """Return the numbers of splits of a product's `steps` along K to try.

    They are powers of two that leave each split at least two steps, with a limited number of programs.
    """
    return [s for s in (1, 2, 4, 8) if steps >= 2 * s and (s == 1 or tiles * s <= _MOST_PROGRAMS)]
