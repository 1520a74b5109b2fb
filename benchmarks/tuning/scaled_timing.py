"""Times products whose weights and inputs both have 8 bits, for `benchmarks.tuning.packed_timing --scaled`.

For each product, form and number of tokens: the quantizing of the input, Triton's product by the rule's tile or the
fastest of some, for one token also both in one launch, the library's, the one with the same weight and inputs of 16
bits, and that in bfloat16. So the number of tokens can be read off from which each is the fastest
(`scaled_products.LIBRARY_TOKENS`). The activation of gate and up and the sum with the residual stream are included, but
for cuBLAS's products in bfloat16.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.ceilings import graph_seconds
from benchmarks.tuning.linear_candidates import Product
from benchmarks.tuning.linear_timing import Weights, make_inputs, product_seconds
from tandem.engine.kernels.layers import Linear
from tandem.engine.kernels.linear.triton_activation import silu_mul
from tandem.engine.kernels.linear.triton_linear import ADD
from tandem.engine.kernels.linear.triton_linear_plan import TOKEN_TILES, fits_scratch, tile_for
from tandem.engine.kernels.linear.triton_linear_tiles import Skinny
from tandem.engine.kernels.packed import packed_products, scaled_products
from tandem.engine.kernels.packed.library_products import library_product
from tandem.engine.kernels.packed.scaled_weight import QuantizedInput, ScaledWeight
from tandem.engine.kernels.packed_weight import PackedWeight
from tandem.engine.kernels.triton_launch import overlaps_launches

TOKENS = (1, 16, 32, 64, 96, 128, 160, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
FORMS = {"fp8": (torch.float8_e4m3fn, 0), "fp8_blocks": (torch.float8_e4m3fn, 128), "int8": (torch.int8, 0)}
"""The type of codes, and the columns of a group; 0 = one scale a row."""
_ROTATED_BYTES = 256 << 20

Figures = dict[str, float | str]


def make_weight(product: Product, form: str) -> PackedWeight:
    """Returns a random weight, in blocks with a scale for 128 rows."""
    dtype, group = FORMS[form]
    codes = torch.randint(0, 112, (product.n, product.k), dtype=torch.uint8, device="cuda").view(dtype)
    groups = product.k // (group or product.k)
    scales = torch.rand(math.ceil(product.n / (group or 1)), groups, device="cuda")
    scales = scales.repeat_interleave(group or 1, dim=0)[: product.n]
    return PackedWeight(codes, scales, None, group or product.k, quantized_inputs=True)


def measure(product: Product, form: str, tokens: int, *, candidates: bool) -> Figures:
    """Returns the figures of one product: microseconds, and TFLOP/s of the faster one of the 8-bit products."""
    plain = [make_weight(product, form)]
    plain += [make_weight(product, form) for _ in range(math.ceil(_ROTATED_BYTES / plain[0].nbytes) - 1)]
    scaled = [scaled_products.prepared(weight) for weight in plain]
    inputs = make_inputs(product, tokens, product.normed)
    pdl = overlaps_launches()
    quantize = partial(scaled_products.quantized, inputs.x, inputs.norm, scaled[0], pdl=pdl)
    x = quantize()
    found: Figures = {"product": product.name, "form": form, "tokens": tokens}
    found["quantize_us"] = _us(lambda _: quantize(), 8)

    def triton_product(tile: Skinny | None, number: int) -> None:
        weight = scaled[number % len(scaled)]
        scaled_products.launch(x, weight, None, inputs.out, product.op, pdl=pdl, tile=tile)

    count = max(4, len(scaled))
    tiles: dict[str, float] = {}
    for tile in list(_tiles(product, tokens, scaled[0]))[: None if candidates else 1]:
        try:
            tiles[str(tile)] = _us(partial(triton_product, tile), count)
        except Exception as error:  # a tile may need more shared memory or registers than there are
            print(f"{tile}: {error}".splitlines()[0])
    best = min(tiles, key=lambda tile: tiles[tile])
    found |= {"triton_us": tiles[best], "rule_us": next(iter(tiles.values())), "tile": best}
    if scaled_products.uses_library(1 << 20, scaled[0], torch.bfloat16):
        found["library_us"] = _library_us(product, x, scaled, inputs.out, count)
    if tokens <= packed_products.FUSED_TOKENS:
        found["weight_only_us"] = _weight_only_us(product, plain, tokens, count)
    fused = [tile_for(tokens, product.n, product.k, product.paired, 2)] if tokens <= TOKEN_TILES[-1] else []
    half = Weights(max(product.n * product.k, _ROTATED_BYTES // 2))
    found["bf16_us"] = min(
        round(product_seconds(product, tokens, tile, half, normed=False, pdl=pdl) * 1e6, 2) for tile in (*fused, None)
    )
    fastest = min(float(found["triton_us"]), float(found.get("library_us", math.inf)))
    found["tflops"] = round(2e-6 * tokens * product.n * product.k / fastest, 1)
    found["times_bf16"] = round(float(found["bf16_us"]) / (fastest + float(found["quantize_us"])), 3)
    return found


def _library_us(product: Product, x: QuantizedInput, weights: list[ScaledWeight], out: Tensor, count: int) -> float:
    pdl = overlaps_launches()

    def launch(number: int) -> None:
        found = library_product(x, weights[number % len(weights)], None, torch.bfloat16)
        if product.paired:
            silu_mul(found, pdl=pdl)
        elif product.op == ADD.value:
            out.add_(found)

    return _us(launch, count)


def _weight_only_us(product: Product, weights: list[PackedWeight], tokens: int, count: int) -> float:
    prepared = [packed_products.prepared(weight) for weight in weights]
    inputs, pdl = make_inputs(product, tokens, normed=False), overlaps_launches()

    def launch(number: int) -> None:
        weight = prepared[number % len(prepared)]
        packed_products.launch(inputs.x, None, Linear(weight), inputs.out, product.op, pdl=pdl)

    return _us(launch, count)


def _tiles(product: Product, tokens: int, weight: ScaledWeight) -> Iterator[Skinny]:
    """Yields the rule's tile, then others."""
    rule = scaled_products.tile_for(tokens, product.outputs, product.k, product.paired, weight.group)
    yield rule
    for rows, warps in ((64, 4), (128, 4), (64, 8), (128, 8)):
        for bucket in {min(rule.tokens, 128), rule.tokens}:
            for splits in (1, 2, 4) if tokens <= bucket else (1,):
                for stages in (3, 4, 6):
                    tile = Skinny(rows, bucket, rule.columns, splits, stages, warps, rule.early)
                    tiles = math.ceil(product.outputs / rows) * math.ceil(tokens / bucket)
                    if tile != rule and fits_scratch(tile, tiles, product.paired):
                        yield tile


def _us(launch: Callable[[int], object], count: int) -> float:
    return round(graph_seconds(launch, count) * 1e6, 2)
