"""The weight-streaming products of a model, and candidate tiles for each."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.gpu.dense_layer import dense_layer
from tandem.engine.config.model import ModelSpec
from tandem.engine.kernels.linear import triton_linear
from tandem.engine.kernels.linear.triton_linear_plan import MULTIPROCESSORS, TOKEN_TILES, fits_scratch
from tandem.engine.kernels.linear.triton_linear_tiles import Gemv, Skinny, Tile

STORE, GATE_UP, ADD = (int(op.value) for op in (triton_linear.STORE, triton_linear.GATE_UP, triton_linear.ADD))

_SHARED_MEMORY = 227 << 10
_SUMS_PER_WARP = 4096
"""float32 sums that a warp's registers can hold in addition to everything else: 128 per thread."""

_SKINNY_TILES = {
    16: ((16, 256, 4, 4), (32, 128, 4, 4), (64, 128, 4, 4), (64, 256, 3, 4)),
    32: ((32, 128, 4, 4), (64, 128, 4, 4), (64, 64, 6, 4), (128, 64, 4, 8)),
    64: ((64, 128, 3, 4), (128, 64, 4, 4), (128, 64, 4, 8), (256, 64, 4, 8)),
    128: ((64, 64, 4, 4), (128, 64, 4, 8), (128, 128, 3, 8), (256, 64, 3, 8)),
}
"""Candidates by tokens: (rows, columns, stages, warps)."""


@dataclass(frozen=True)
class Product:
    """One weight [n, k] of a model and the operation that it is used in."""

    name: str
    n: int
    k: int
    op: int
    normed: bool

    @property
    def paired(self) -> bool:
        """True if its rows are pairs of gate and up."""
        return self.op == GATE_UP

    @property
    def outputs(self) -> int:
        """Number of output columns."""
        return self.n // 2 if self.paired else self.n

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight in bfloat16."""
        return 2 * self.n * self.k


@dataclass(frozen=True)
class Model:
    """Layers of four products each, and the output layer."""

    name: str
    layers: int
    products: tuple[Product, ...]

    @property
    def largest(self) -> int:
        """Number of elements of its largest weight."""
        return max(product.n * product.k for product in self.products)


def model_of(name: str, shape: ModelSpec) -> Model:
    """Returns the products of a shape, the output layer last."""
    attention, feed_forward = dense_layer(shape)
    hidden, inner = shape.hidden_size, feed_forward.width
    products = (
        Product("qkv", attention.shape.qkv_size, hidden, STORE, normed=True),
        Product("o", hidden, attention.shape.heads * attention.shape.head_dim, ADD, normed=False),
        Product("gate_up", 2 * inner, hidden, GATE_UP, normed=True),
        Product("down", hidden, inner, ADD, normed=False),
        Product("head", shape.vocab_size, hidden, STORE, normed=True),
    )
    return Model(name, len(shape.layers), products)


def candidates(product: Product, tokens: int, early: Sequence[int]) -> list[Tile]:
    """Returns a short list of tiles for a step of `tokens`; `early`: bytes of each row prefetched into L2."""
    if tokens == 1:
        return list(_gemv_candidates(product))
    return [tile for ahead in early for tile in _skinny_candidates(product, tokens, ahead)]


def _gemv_candidates(product: Product) -> Iterable[Gemv]:
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
    bucket = next(tile for tile in TOKEN_TILES if tokens <= tile)
    factor = 2 if product.paired else 1
    for rows, columns, stages, warps in _SKINNY_TILES[bucket]:
        shared = 2 * columns * (rows * factor + bucket) * stages
        if shared > _SHARED_MEMORY or rows * bucket * factor > _SUMS_PER_WARP * warps:
            continue
        tiles = math.ceil(product.outputs / rows)
        for splits in _useful_splits(tiles, product.k // columns):
            tile = Skinny(rows, bucket, columns, splits, stages, warps, early)
            if fits_scratch(tile, tiles, product.paired):
                yield tile


def _useful_splits(tiles: int, steps: int) -> list[int]:
    """Returns the two smallest powers of two that give most multiprocessors a program, each with two steps or more."""
    fitting = [s for s in (1, 2, 4, 8) if steps >= 2 * s and (s == 1 or tiles * s <= 6 * MULTIPROCESSORS)]
    full = [s for s in fitting if tiles * s >= 0.9 * MULTIPROCESSORS]
    return full[:2] or fitting[-1:]
