"""The forms of a product's weight on a GPU (bfloat16, packed, scaled): tiles, launch, and alternative computations."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from benchmarks.gpu_timing import graph_seconds
from benchmarks.kernels.dense_layer import Product
from benchmarks.kernels.product_candidates import (
    bucket_of,
    candidates,
    gemv_candidates,
    packed_candidates,
    splits_of,
    w4a8_candidates,
)
from tandem.engine.kernels.held_weight import step_bytes
from tandem.engine.kernels.layers import Linear, Norm
from tandem.engine.kernels.linear import triton_linear
from tandem.engine.kernels.linear.triton_activation import silu_mul
from tandem.engine.kernels.linear.triton_linear_plan import FUSED_NORM_TOKENS, TOKEN_TILES, fits_scratch, tile_for
from tandem.engine.kernels.linear.triton_linear_tiles import Gemv, Skinny, Tile
from tandem.engine.kernels.packed import packed_products, scaled_products, scaled_tiles, w4a8_products, w4a8_tiles
from tandem.engine.kernels.packed.library_products import library_product
from tandem.engine.kernels.packed.scaled_weight import QuantizedInput, ScaledWeight
from tandem.engine.kernels.packed_weight import PackedWeight
from tandem.engine.kernels.rowwise.triton_norm import rms_norm
from tandem.engine.kernels.triton_launch import overlaps_launches
from tandem.engine.quantizer.sparsity import prune_by_magnitude

EARLY = 512
"""Bytes of a weight row that candidates prefetch into L2."""
_EPS = 1e-5
_DEQUANTIZED_FROM = 128
"""Minimum number of tokens for which the product with a dequantized weight is measured as well."""
_SCALED_TILES = (
    (64, 128, 6, 4, EARLY),
    (64, 128, 6, 4, 4 * EARLY),
    (64, 256, 4, 4, EARLY),
    (128, 128, 4, 4, EARLY),
    (128, 128, 4, 8, EARLY),
)
"""Candidates for 8-bit codes with 8-bit inputs: (rows, columns, stages, warps, bytes prefetched into L2)."""
_LEAST_GEMV_COLUMNS = 4096
"""Minimum number of columns of 8-bit codes that a program for one token reads at a time."""
_ROTATED_BYTES = 160 << 20
"""Minimum total size of the weights in a timed graph: three times L2."""


@dataclass(frozen=True)
class Inputs:
    """A product's input [tokens, k], norm weight and output."""

    x: Tensor
    norm: Norm | None
    out: Tensor


class Form(Protocol):
    """A form of weights, such as bfloat16 or packed int4."""

    def weight(self, product: Product) -> Any:
        """Return a random weight in the layout that kernels read."""

    def inputs(self, product: Product, tokens: int) -> Inputs:
        """Return random inputs, with a norm if the engine fuses it into the product."""

    def tiles(self, product: Product, tokens: int, *, others: bool) -> list[Tile]:
        """Return the engine's tile, followed by candidates if `others`."""

    def launch(self, product: Product, inputs: Inputs, tile: Tile, weight: Any) -> None:
        """Launch the product's kernel with this tile."""

    def beside(self, product: Product, tokens: int, weights: Sequence[Any]) -> dict[str, float]:
        """Return the microseconds of alternative ways to compute the product, by name."""


def rotated(form: Form, product: Product) -> list[Any]:
    """Return weights that together exceed L2 several times."""
    first = form.weight(product)
    return [first, *(form.weight(product) for _ in range(math.ceil(_ROTATED_BYTES / first.nbytes) - 1))]


def us_of(launch: Callable[[Any], object], weights: Sequence[Any]) -> float:
    """Return the microseconds per launch, in a graph of launches with different weights."""
    seconds = graph_seconds(lambda number: launch(weights[number % len(weights)]), max(4, len(weights)))
    return round(seconds * 1e6, 2)


def make_inputs(product: Product, tokens: int, *, normed: bool) -> Inputs:
    """Return random inputs of a product."""

    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, dtype=torch.bfloat16, device="cuda")

    norm = Norm(random(product.k), _EPS) if normed else None
    return Inputs(random(tokens, product.k), norm, random(tokens, product.outputs))


@dataclass(frozen=True)
class Plain:
    """Weights in bfloat16."""

    def weight(self, product: Product) -> Tensor:
        """Implement `Form.weight`."""
        return torch.empty(product.n, product.k, dtype=torch.bfloat16, device="cuda").normal_(std=0.02)

    def inputs(self, product: Product, tokens: int) -> Inputs:
        """Implement `Form.inputs`."""
        return make_inputs(product, tokens, normed=product.normed)

    def tiles(self, product: Product, tokens: int, *, others: bool) -> list[Tile]:
        """Implement `Form.tiles`."""
        rule = tile_for(tokens, product.n, product.k, product.paired, 2)
        return list(dict.fromkeys([rule, *(candidates(product, tokens, [EARLY]) if others else [])]))

    def launch(self, product: Product, inputs: Inputs, tile: Tile, weight: Tensor) -> None:
        """Implement `Form.launch`."""
        pdl = overlaps_launches()
        triton_linear.launch(inputs.x, inputs.norm, Linear(weight), inputs.out, product.op, pdl=pdl, tile=tile)

    def beside(self, product: Product, tokens: int, weights: Sequence[Tensor]) -> dict[str, float]:
        """Return the time of cuBLAS for the plain product, without norm and activation, and that of a sparse one."""
        x = make_inputs(product, tokens, normed=False).x
        wide = x.new_empty(tokens, product.n)
        times_us = {"cublas_us": us_of(lambda weight: torch.matmul(x, weight.t(), out=wide), weights)}
        return times_us | _sparse_us(weights, tokens)


@dataclass(frozen=True)
class Packed:
    """Quantized weights stored as codes; `group` columns share a scale, 0 = a whole row does."""

    dtype: torch.dtype
    bits: int
    group: int = 0

    def weight(self, product: Product) -> PackedWeight:
        """Implement `Form.weight`."""
        codes = torch.randint(0, 112, (product.n, product.k * self.bits // 8), dtype=torch.uint8, device="cuda")
        group = self.group or product.k
        scales = torch.rand(product.n, product.k // group, device="cuda", dtype=torch.bfloat16)
        return packed_products.prepared(PackedWeight(codes.view(self.dtype), scales, None, group))

    def inputs(self, product: Product, tokens: int) -> Inputs:
        """Implement `Form.inputs`."""
        return make_inputs(product, tokens, normed=product.normed)

    def tiles(self, product: Product, tokens: int, *, others: bool) -> list[Tile]:
        """Implement `Form.tiles`."""
        codes = torch.empty(1, product.k * self.bits // 8, dtype=torch.uint8).view(self.dtype)
        group = self.group or product.k
        columns = step_bytes(PackedWeight(codes, torch.empty(1, product.k // group), None, group))
        tiles: list[Tile] = list(packed_candidates(product, tokens, self.bits, columns))
        return tiles if others and tokens <= TOKEN_TILES[-1] else tiles[:1]

    def launch(self, product: Product, inputs: Inputs, tile: Tile, weight: PackedWeight) -> None:
        """Launch the norm, if the product does not apply it, and the product's kernel."""
        assert isinstance(tile, Skinny)
        x, norm, pdl = inputs.x, inputs.norm, overlaps_launches()
        if norm is not None and len(x) > FUSED_NORM_TOKENS:
            x, norm = rms_norm(x, norm, pdl=pdl), None
        packed_products.launch(x, norm, Linear(weight), inputs.out, product.op, pdl=pdl, tile=tile)

    def beside(self, product: Product, tokens: int, weights: Sequence[PackedWeight]) -> dict[str, float]:
        """Return the time of the product with a dequantized weight, for many tokens."""
        if tokens < _DEQUANTIZED_FROM:
            return {}
        x = make_inputs(product, tokens, normed=False).x
        out = x.new_empty(tokens, product.n)
        multiply = packed_products.multiply_dequantized
        return {"dequantized_us": us_of(lambda weight: multiply(x, weight, None, out), weights)}


@dataclass(frozen=True)
class Scaled:
    """8-bit codes whose inputs are quantized to 8 bits as well.

    Blocks of `group` columns and rows share a scale; 0 = one scale per row.
    """

    dtype: torch.dtype
    group: int = 0

    def weight(self, product: Product) -> ScaledWeight:
        """Implement `Form.weight`."""
        codes = torch.randint(0, 112, (product.n, product.k), dtype=torch.uint8, device="cuda").view(self.dtype)
        groups = product.k // (self.group or product.k)
        scales = torch.rand(math.ceil(product.n / (self.group or 1)), groups, device="cuda")
        scales = scales.repeat_interleave(self.group or 1, dim=0)[: product.n]
        plain = PackedWeight(codes, scales, None, self.group or product.k, quantized_inputs=True)
        return scaled_products.prepared(plain)

    def inputs(self, product: Product, tokens: int) -> Inputs:
        """Implement `Form.inputs`."""
        return make_inputs(product, tokens, normed=product.normed)

    def tiles(self, product: Product, tokens: int, *, others: bool) -> list[Tile]:
        """Implement `Form.tiles`."""
        tiles = self._tiles(product, tokens)
        return [next(tiles), *(tiles if others else ())]

    def launch(self, product: Product, inputs: Inputs, tile: Tile, weight: ScaledWeight) -> None:
        """Quantize the input and launch the product's kernel."""
        pdl = overlaps_launches()
        x = scaled_products.quantized(inputs.x, inputs.norm, weight, pdl=pdl)
        scaled_products.launch(x, weight, None, inputs.out, product.op, pdl=pdl, tile=tile)

    def beside(self, product: Product, tokens: int, weights: Sequence[ScaledWeight]) -> dict[str, float]:
        """Return the time to quantize the input, that of a library's product with it, and that of a sparse product."""
        inputs, pdl = self.inputs(product, tokens), overlaps_launches()
        quantize = partial(scaled_products.quantized, inputs.x, inputs.norm, pdl=pdl)
        times_us = {"quantize_us": us_of(quantize, weights), **_sparse_us([one.codes for one in weights], tokens)}
        if not scaled_products.uses_library(1 << 20, weights[0], torch.bfloat16):
            return times_us

        def by_library(weight: ScaledWeight) -> None:
            _finish(library_product(quantize(weight), weight, None, torch.bfloat16), product, inputs.out)

        return times_us | {"library_us": us_of(by_library, weights)}

    def _tiles(self, product: Product, tokens: int) -> Iterator[Tile]:
        rule = scaled_tiles.tile_for(tokens, product.outputs, product.k, product.paired, self.group or product.k)
        yield rule
        if tokens > TOKEN_TILES[-1]:
            return
        if tokens == 1 and self.dtype == torch.float8_e4m3fn and not self.group:
            yield from (tile for tile in gemv_candidates(product) if tile.columns >= _LEAST_GEMV_COLUMNS)
        for rows, columns, stages, warps, early in _SCALED_TILES:
            tiles = math.ceil(product.outputs / rows)
            for splits in splits_of(tiles, product.k // columns):
                tile = Skinny(rows, bucket_of(tokens), columns, splits, stages, warps, early)
                if tile != rule and fits_scratch(tile, tiles, product.paired) and columns <= (self.group or product.k):
                    yield tile


@dataclass(frozen=True)
class W4A8(Packed):
    """4-bit weights whose inputs are quantized to FP8, with a scale per token or, if `grouped`, also per group."""

    grouped: bool = False

    def tiles(self, product: Product, tokens: int, *, others: bool) -> list[Tile]:
        """Implement `Form.tiles`."""
        tiles: list[Tile] = list(w4a8_candidates(product, tokens))
        return tiles if others else tiles[:1]

    def launch(self, product: Product, inputs: Inputs, tile: Tile, weight: PackedWeight) -> None:
        """Quantize the input and launch the product's kernel."""
        assert isinstance(tile, Skinny)
        x = self._quantized(inputs, weight)
        w4a8_products.launch(x, weight, None, inputs.out, product.op, pdl=overlaps_launches(), tile=tile)

    def beside(self, product: Product, tokens: int, weights: Sequence[PackedWeight]) -> dict[str, float]:
        """Return the time to quantize the input, and of the library's product with codes widened to 8 bits."""
        inputs = self.inputs(product, tokens)
        times_us = {"quantize_us": us_of(partial(self._quantized, inputs), weights)}
        if tokens < _DEQUANTIZED_FROM:
            return times_us

        def by_library(weight: PackedWeight) -> None:
            made = w4a8_products.library_product(self._quantized(inputs, weight), weight, None, torch.bfloat16)
            _finish(made, product, inputs.out)

        times_us["widen_us"] = us_of(w4a8_products.widened, weights)
        return times_us | {"library_us": us_of(by_library, weights)}

    def _quantized(self, inputs: Inputs, weight: PackedWeight) -> QuantizedInput:
        return w4a8_products.quantized(inputs.x, inputs.norm, weight, pdl=overlaps_launches(), grouped=self.grouped)


def _sparse_us(weights: Sequence[Tensor], tokens: int) -> dict[str, float]:
    """Return the time of cuSPARSELt's product of 2:4 sparse weights [N, K] with given inputs, without scales.

    Each weight is pruned by magnitude. Inputs are padded to 32 tokens. Empty if PyTorch lacks the library.
    """
    if not torch.backends.cusparselt.is_available():
        return {}
    compressed = [torch._cslt_compress(prune_by_magnitude(weight.float()).to(weight.dtype)) for weight in weights]
    x = torch.zeros(math.ceil(tokens / 32) * 32, weights[0].shape[1], device="cuda").to(weights[0].dtype).t()
    out_dtype = None if weights[0].dtype == torch.bfloat16 else torch.bfloat16
    algorithm = torch._cslt_sparse_mm_search(compressed[0], x, out_dtype=out_dtype, transpose_result=True)

    def multiply(weight: Tensor) -> None:
        torch._cslt_sparse_mm(weight, x, out_dtype=out_dtype, transpose_result=True, alg_id=algorithm)

    return {"sparse_us": us_of(multiply, compressed)}


def _finish(made: Tensor, product: Product, out: Tensor) -> None:
    """Apply what Triton's products include: the activation, or the sum with the output."""
    if product.paired:
        silu_mul(made, pdl=overlaps_launches())
    elif product.op == triton_linear.ADD.value:
        out.add_(made)


FORMS: Mapping[str, Form] = {
    "bfloat16": Plain(),
    "int8": Packed(torch.int8, 8),
    "fp8": Packed(torch.float8_e4m3fn, 8),
    "int4": Packed(torch.uint8, 4, group=128),
    "w4a8": W4A8(torch.uint8, 4, group=128),
    "w4a8-groups": W4A8(torch.uint8, 4, group=128, grouped=True),
    "scaled-int8": Scaled(torch.int8),
    "scaled-fp8": Scaled(torch.float8_e4m3fn),
    "scaled-fp8-blocks": Scaled(torch.float8_e4m3fn, group=128),
}


@dataclass(frozen=True)
class Job:
    """One variant of a product's kernel, to compile and measure."""

    product: Product
    form: str
    tokens: int
    tile: Tile

    def run(self) -> None:
        """Launch the variant once."""
        form = FORMS[self.form]
        form.launch(self.product, form.inputs(self.product, self.tokens), self.tile, form.weight(self.product))

    @property
    def kernel(self) -> tuple[Product, str, Tile]:
        """Return what a kernel is compiled for: variants that differ only in the number of tokens share it."""
        return self.product, self.form, self.tile

    @property
    def bucket(self) -> int:
        """The number of tokens under which the engine's tables list the tile."""
        if isinstance(FORMS[self.form], W4A8):
            return w4a8_tiles.bucket_of(self.tokens)
        return 1 if isinstance(self.tile, Gemv) else bucket_of(self.tokens)

    def __str__(self) -> str:
        return f"{self.product.name} {self.product.n}x{self.product.k} {self.form} {self.tile}"
