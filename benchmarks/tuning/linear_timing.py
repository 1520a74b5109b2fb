"""Times one weight-streaming product, and all products of a decode step, in bfloat16."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu.ceilings import graph_seconds
from benchmarks.tuning.linear_candidates import Model, Product
from tandem.engine.kernels.layers import Linear, Norm
from tandem.engine.kernels.linear import triton_linear
from tandem.engine.kernels.linear.triton_linear_tiles import Tile

_ROTATED_BYTES = 256 << 20
"""Minimum size of the weights that a timed graph uses: five times L2."""
_EPS = 1e-5

Found = dict[tuple[Product, int], Tile]
"""The fastest tile of each product and number of tokens."""


class Weights:
    """Small random bfloat16 numbers, of which every weight is a view: `numbers` of them, 1 GiB or more."""

    def __init__(self, numbers: int) -> None:
        self.memory: Tensor = torch.empty(numbers, dtype=torch.bfloat16, device="cuda").normal_(std=0.02)

    def of(self, product: Product, count: int) -> list[Tensor]:
        """Returns `count` views, without overlap as long as the memory lasts."""
        numbers = product.n * product.k
        places = max(1, len(self.memory) // numbers)
        starts = [(i % places) * numbers for i in range(count)]
        return [self.memory[start : start + numbers].view(product.n, product.k) for start in starts]

    def chain(self, products: Sequence[Product]) -> list[Tensor]:
        """Returns a weight for each product, contiguous as long as the memory lasts."""
        offset, found = 0, []
        for product in products:
            numbers = product.n * product.k
            offset = 0 if offset + numbers > len(self.memory) else offset
            found.append(self.memory[offset : offset + numbers].view(product.n, product.k))
            offset += numbers
        return found


@dataclass(frozen=True)
class Inputs:
    """A product's input, norm weight and output."""

    x: Tensor
    norm: Norm | None
    out: Tensor


def make_inputs(product: Product, tokens: int, normed: bool) -> Inputs:
    """Returns random inputs of a product for `tokens` tokens."""

    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, dtype=torch.bfloat16, device="cuda")

    norm = Norm(random(product.k), _EPS) if normed else None
    return Inputs(random(tokens, product.k), norm, random(tokens, product.outputs))


def launch(product: Product, inputs: Inputs, weight: Tensor, tile: Tile | None, pdl: bool) -> None:
    """Launches the product's kernel with this tile."""
    triton_linear.launch(inputs.x, inputs.norm, Linear(weight), inputs.out, product.op, pdl=pdl, tile=tile)


def product_seconds(
    product: Product, tokens: int, tile: Tile | None, weights: Weights, *, normed: bool, pdl: bool
) -> float:
    """Returns seconds of one product by `tile`, or by cuBLAS (the plain product) where it is None."""
    count = max(4, math.ceil(_ROTATED_BYTES / product.weight_bytes))
    inputs = make_inputs(product, tokens, normed)
    wide = torch.empty(tokens, product.n, dtype=torch.bfloat16, device="cuda")
    calls = [_call(product, inputs, weight, wide, tile=tile, pdl=pdl) for weight in weights.of(product, count)]
    return graph_seconds(lambda number: calls[number](), count)


def fastest(product: Product, tokens: int, tiles: Sequence[Tile], weights: Weights, *, pdl: bool) -> Tile:
    """Returns the fastest of `tiles`, with the norm where the product has one."""
    seconds = {tile: product_seconds(product, tokens, tile, weights, normed=product.normed, pdl=pdl) for tile in tiles}
    return min(seconds, key=lambda tile: seconds[tile])


def chain_seconds(model: Model, tokens: int, found: Found | None, weights: Weights, *, pdl: bool) -> float:
    """Returns seconds of a decode step's products in one graph, each reading the one before's output.

    Without `found` cuBLAS computes them.
    """
    widest = max(max(p.n, p.k) for p in model.products)
    memory = [torch.randn(tokens * widest, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    norm = torch.ones(widest, dtype=torch.bfloat16, device="cuda")
    *layer, head = model.products
    products, calls = [*layer * model.layers, head], []
    for number, (product, weight) in enumerate(zip(products, weights.chain(products), strict=True)):
        x, out = (memory[(number + side) % 2] for side in (0, 1))
        source = x[: tokens * product.k].view(tokens, product.k)
        wide = out[: tokens * product.n].view(tokens, product.n)
        narrow = out[: tokens * product.outputs].view(tokens, product.outputs)
        inputs = Inputs(source, Norm(norm[: product.k], _EPS) if product.normed else None, narrow)
        tile = None if found is None else found[product, tokens]
        calls.append(_call(product, inputs, weight, wide, tile=tile, pdl=pdl))
    return len(calls) * graph_seconds(lambda number: calls[number](), len(calls))


def _call(
    product: Product, inputs: Inputs, weight: Tensor, wide: Tensor, *, tile: Tile | None, pdl: bool
) -> Callable[[], object]:
    if tile is None:
        return lambda: torch.matmul(inputs.x, weight.t(), out=wide)
    return lambda: launch(product, inputs, weight, tile, pdl)
