"""Random packed weights of a product, candidate tiles for it, and their compilation."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.tuning.linear_candidates import Product
from benchmarks.tuning.linear_timing import Inputs, make_inputs
from tandem.engine.kernels.layers import Linear
from tandem.engine.kernels.linear.triton_linear_plan import FUSED_NORM_TOKENS, MULTIPROCESSORS, fits_scratch
from tandem.engine.kernels.linear.triton_linear_tiles import Skinny
from tandem.engine.kernels.packed import packed_products
from tandem.engine.kernels.packed.packed_tiles import TOKEN_TILES, tile_for
from tandem.engine.kernels.packed_weight import PackedWeight
from tandem.engine.kernels.triton_launch import overlaps_launches

FORMS = {"int8": (torch.int8, 8), "fp8": (torch.float8_e4m3fn, 8), "int4": (torch.uint8, 4)}
_SHARED_MEMORY = 227 << 10
_MOST_PROGRAMS = 6 * MULTIPROCESSORS

_TILES = {
    16: ((64, 4, 4), (64, 6, 4), (128, 4, 4), (128, 4, 8)),
    32: ((64, 4, 4), (64, 6, 4), (128, 4, 4), (128, 4, 8)),
    64: ((64, 3, 4), (64, 5, 4), (128, 3, 4), (128, 4, 8)),
    128: ((64, 3, 4), (64, 3, 8), (128, 3, 8), (128, 4, 8)),
}
"""Candidates by tokens: (rows, stages, warps)."""


def make_weight(product: Product, form: str, group: int) -> PackedWeight:
    """Returns a random weight; a group of 0 gives one scale a row."""
    dtype, bits = FORMS[form]
    codes = torch.randint(0, 112, (product.n, product.k * bits // 8), dtype=torch.uint8, device="cuda")
    group = group or product.k
    scales = torch.rand(product.n, product.k // group, device="cuda", dtype=torch.bfloat16)
    return packed_products.prepared(PackedWeight(codes.view(dtype), scales, None, group))


def bucket_of(tokens: int) -> int:
    """Returns the number of tokens of the tile that a step of `tokens` takes."""
    return next((size for size in TOKEN_TILES if tokens <= size), TOKEN_TILES[-1])


def rule_of(product: Product, tokens: int, form: str, columns: int) -> Skinny:
    """Returns the engine's tile."""
    return tile_for(tokens, product.n, product.k, product.paired, FORMS[form][1], columns)


def candidates(product: Product, tokens: int, form: str, columns: int) -> Iterator[Skinny]:
    """Yields the engine's tile, then others of `columns` bytes."""
    rule = rule_of(product, tokens, form, columns)
    yield rule
    bucket, factor = bucket_of(tokens), 2 if product.paired else 1
    steps = product.k * FORMS[form][1] // 8 // columns
    for rows, stages, warps in _TILES[bucket]:
        inputs = 2 * bucket * columns * 8 // FORMS[form][1]
        shared = (stages - 1) * (columns * rows * factor + inputs) + inputs
        if shared > _SHARED_MEMORY or rows * bucket * factor > 4096 * warps:
            continue
        tiles = math.ceil(product.outputs / rows) * math.ceil(tokens / bucket)
        for splits in _useful_splits(tiles, steps):
            tile = Skinny(rows, bucket, columns, splits, stages, warps, early=512)
            if tile != rule and fits_scratch(tile, tiles, product.paired):
                yield tile


def _useful_splits(tiles: int, steps: int) -> list[int]:
    """Returns the three largest powers of two that leave two steps or more to each of not too many programs."""
    fitting = [s for s in (1, 2, 4, 8) if steps >= 2 * s and (s == 1 or tiles * s <= _MOST_PROGRAMS)]
    return [s for s in fitting if s == fitting[-1] or tiles * s >= 0.9 * MULTIPROCESSORS][-3:]


def launch_packed(product: Product, weight: PackedWeight, tile: Skinny, inputs: Inputs) -> None:
    """Launches the product's kernel with this tile."""
    packed_products.launch(
        inputs.x, inputs.norm, Linear(weight), inputs.out, product.op, pdl=overlaps_launches(), tile=tile
    )


@dataclass(frozen=True)
class PackedJob:
    """One variant of the kernel to compile and measure."""

    product: Product
    tokens: int
    form: str
    group: int
    tile: Skinny

    @property
    def memory_numbers(self) -> int:
        """Elements of the memory that `run` needs: none, the weight is made."""
        return 0

    def run(self, memory: Tensor) -> None:
        """Launches the variant once."""
        del memory
        inputs = make_inputs(self.product, self.tokens, self.product.normed and self.tokens <= FUSED_NORM_TOKENS)
        weight = make_weight(self.product, self.form, self.group)
        launch_packed(self.product, weight, self.tile, inputs)

    def __str__(self) -> str:
        return f"{self.product.name} {self.form} {self.tile}"
