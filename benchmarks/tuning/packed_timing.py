"""Times the products with packed weights of a model's shape: `python -m benchmarks.tuning.packed_timing`.

For each product and number of tokens the time of the rule's tile, or with `--candidates` of the fastest of some, and
the share of the run's own copy bandwidth at which codes and scales are read; then the same product in bfloat16, by the
engine's tile or by cuBLAS, whichever is faster. With `--scaled` the products whose inputs have 8 bits, too, see
`benchmarks.tuning.scaled_timing`. The last line is one JSON object.
"""

import argparse
import json
import math
from collections.abc import Iterator

import torch

from benchmarks.command_line import need_gpu
from benchmarks.gpu.ceilings import copy_bandwidth, graph_seconds
from benchmarks.tuning import scaled_timing
from benchmarks.tuning.linear_candidates import Product, model_of
from benchmarks.tuning.linear_timing import Weights, make_inputs, product_seconds
from engine.kernels.held_weight import step_bytes
from engine.kernels.linear.triton_linear_plan import FUSED_NORM_TOKENS, fits_scratch, tile_for
from engine.kernels.linear.triton_linear_tiles import Skinny
from engine.kernels.packed import packed_products
from engine.kernels.packed_weight import PackedWeight
from engine.kernels.triton_launch import overlaps_launches
from engine.models.shapes import shape_config, shape_names

FORMS = {"int8": (torch.int8, 8), "fp8": (torch.float8_e4m3fn, 8), "int4": (torch.uint8, 4)}
_ROTATED_BYTES = 256 << 20
"""Minimum size of the weights that a timed graph uses: five times L2."""
_EPS = 1e-5

Figures = dict[str, float | str]


def make_weight(product: Product, form: str, group: int) -> PackedWeight:
    """Returns a random weight; a group of 0 gives one scale a row."""
    dtype, bits = FORMS[form]
    codes = torch.randint(0, 112, (product.n, product.k * bits // 8), dtype=torch.uint8, device="cuda")
    group = group or product.k
    scales = torch.rand(product.n, product.k // group, device="cuda", dtype=torch.bfloat16)
    return packed_products.prepared(PackedWeight(codes.view(dtype), scales, None, group))


def candidates(product: Product, tokens: int, weight: PackedWeight) -> Iterator[Skinny]:
    """Yields the rule's tile, then others of the same columns."""
    rule = packed_products.tile_for(tokens, product.outputs, product.k, product.paired, step_bytes(weight))
    yield rule
    for rows, warps in ((64, 4), (64, 8), (128, 4), (128, 8)):
        for splits in (1, 2, 4, 8):
            for stages in (3, 5, 7):
                tile = Skinny(rows, rule.tokens, rule.columns, splits, stages, warps, rule.early)
                tiles = -(-product.outputs // rows) * -(-tokens // tile.tokens)
                if tile != rule and fits_scratch(tile, tiles, product.paired):
                    yield tile


def packed_seconds(product: Product, tokens: int, weights: list[PackedWeight], tile: Skinny) -> float:
    """Returns seconds of one product, with the norm where the engine leaves it to the product."""
    inputs = make_inputs(product, tokens, product.normed and tokens <= FUSED_NORM_TOKENS)
    pdl = overlaps_launches()

    def launch(number: int) -> None:
        packed_products.launch(
            inputs.x, inputs.norm, _EPS, weights[number % len(weights)], None, inputs.out, product.op, pdl=pdl,
            tile=tile,
        )  # fmt: skip

    return graph_seconds(launch, max(4, len(weights)))


def measure(product: Product, tokens: int, form: str, group: int, others: bool) -> Figures:
    """Measures one product by the rule's tile, or the fastest of all candidates, beside bfloat16."""
    first = make_weight(product, form, group)
    count = max(1, math.ceil(_ROTATED_BYTES / first.nbytes))
    weights = [first, *(make_weight(product, form, group) for _ in range(count - 1))]
    found: dict[Skinny, float] = {}
    for tile in list(candidates(product, tokens, first))[: None if others else 1]:
        try:
            found[tile] = packed_seconds(product, tokens, weights, tile)
        except Exception as error:  # a tile may need more shared memory or registers than there are
            print(f"{tile}: {error}".splitlines()[0])
    best = min(found, key=lambda tile: found[tile])
    plain = Weights(max(product.n * product.k, _ROTATED_BYTES // 2))
    fused = tile_for(tokens, product.n, product.k, product.paired, 2)
    half = min(
        product_seconds(product, tokens, tile, plain, normed=False, pdl=overlaps_launches()) for tile in (fused, None)
    )
    rule = next(iter(found.values()))
    return {
        "product": product.name, "form": form, "tokens": tokens, "us": round(found[best] * 1e6, 2),
        "rule_us": round(rule * 1e6, 2), "bf16_us": round(half * 1e6, 2), "times_bf16": round(half / found[best], 3),
        "bytes_per_s": first.nbytes / found[best], "tile": str(best),
    }  # fmt: skip


def main() -> None:
    """Prints one line for each product, form and number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3-8b", choices=shape_names())
    parser.add_argument("--tokens", type=int, nargs="+", help="default: 1 to 128, with --scaled 1 to 8192")
    parser.add_argument("--forms", nargs="+", choices=sorted({*FORMS, *scaled_timing.FORMS}), help="default: all")
    parser.add_argument(
        "--products", nargs="+", help="qkv, o, gate_up, down, head; default: all, scaled ones without head"
    )
    parser.add_argument("--scaled", action="store_true", help="products whose inputs have 8 bits, too")
    parser.add_argument("--group", type=int, default=128, help="columns with a common scale of int4; others have rows")
    parser.add_argument("--candidates", action="store_true", help="compile other tiles than the rule's, for minutes")
    options = parser.parse_args()
    need_gpu()
    copy = copy_bandwidth()
    print(f"copy: {copy / 1e12:.3f} TB/s on {torch.cuda.get_device_name()}")
    lines: list[Figures] = []
    products = model_of(options.shape, shape_config(options.shape)).products
    wanted = options.products or [each.name for each in products if not (options.scaled and each.name == "head")]
    for product in (each for each in products if each.name in wanted):
        for form in options.forms or list(scaled_timing.FORMS if options.scaled else FORMS):
            for tokens in options.tokens or (scaled_timing.TOKENS if options.scaled else (1, 16, 32, 64, 128)):
                if options.scaled:
                    line = scaled_timing.measure(product, form, tokens, candidates=options.candidates)
                else:
                    group = options.group if form == "int4" else 0
                    line = measure(product, tokens, form, group, options.candidates)
                    line["share_of_copy"] = round(float(line["bytes_per_s"]) / copy, 3)
                lines.append(line)
                print(json.dumps(line), flush=True)
    print(json.dumps({"copy": copy, "products": lines}))


if __name__ == "__main__":
    main()
