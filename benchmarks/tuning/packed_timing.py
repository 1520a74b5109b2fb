"""Times the products with packed weights of a model's shape: `python -m benchmarks.tuning.packed_timing`.

For each product and number of tokens the time of the engine's tile, or with `--candidates` of the fastest of some, and
the share of the run's own copy bandwidth at which codes and scales are read; from 128 tokens on also the time through
a dequantized weight; then the same product in bfloat16, by the engine's tile or by cuBLAS, whichever is faster. With
`--candidates` also lines for `TUNED` of tandem/engine/kernels/packed/packed_tiles.py. With `--scaled` instead the
products whose inputs have 8 bits, too, see `benchmarks.tuning.scaled_timing`. The last line is one JSON object.
"""

import argparse
import json
import math
from collections.abc import Sequence

import torch

from benchmarks.command_line import need_gpu
from benchmarks.gpu.ceilings import copy_bandwidth, graph_seconds
from benchmarks.tuning import scaled_timing
from benchmarks.tuning.linear_candidates import Product, model_of
from benchmarks.tuning.linear_compilers import Compilers
from benchmarks.tuning.linear_timing import Weights, make_inputs, product_seconds
from benchmarks.tuning.packed_candidates import (
    FORMS,
    PackedJob,
    bucket_of,
    candidates,
    launch_packed,
    make_weight,
    rule_of,
)
from tandem.engine.kernels.held_weight import step_bytes
from tandem.engine.kernels.linear.triton_linear import reserve_scratch
from tandem.engine.kernels.linear.triton_linear_plan import FUSED_NORM_TOKENS, tile_for
from tandem.engine.kernels.linear.triton_linear_tiles import Skinny
from tandem.engine.kernels.packed.packed_products import multiply_dequantized
from tandem.engine.kernels.packed.packed_tiles import TOKEN_TILES
from tandem.engine.kernels.packed_weight import PackedWeight
from tandem.engine.kernels.triton_launch import overlaps_launches
from tandem.engine.models.shapes import shape_config, shape_names

_ROTATED_BYTES = 256 << 20
"""Minimum size of the weights that a timed graph uses: five times L2."""
_DEQUANTIZED_FROM = 128
"""The least number of tokens of which the product through a dequantized weight is timed."""

Figures = dict[str, float | str]
Shape = tuple[int, int, int, bool]
"""(bits, rows, columns, True if the rows are gate and up), as in packed_tiles.py."""


def packed_seconds(product: Product, tokens: int, weights: Sequence[PackedWeight], tile: Skinny) -> float:
    """Returns seconds of one product, with the norm where the engine leaves it to the product."""
    inputs = make_inputs(product, tokens, product.normed and tokens <= FUSED_NORM_TOKENS)

    def launch(number: int) -> None:
        launch_packed(product, weights[number % len(weights)], tile, inputs)

    return graph_seconds(launch, max(4, len(weights)))


def dequantized_seconds(product: Product, tokens: int, weights: Sequence[PackedWeight]) -> float:
    """Returns seconds of the plain product through a dequantized weight."""
    inputs = make_inputs(product, tokens, normed=False)
    out = inputs.x.new_empty(tokens, product.n)
    return graph_seconds(
        lambda number: multiply_dequantized(inputs.x, weights[number % len(weights)], None, out), max(4, len(weights))
    )


class Timing:
    """Times products; `half` holds bfloat16's seconds, which all forms are compared with."""

    def __init__(self, copy: float) -> None:
        self.copy = copy
        self._sums: dict[tuple[Shape, int], dict[Skinny, float]] = {}
        self._half: dict[tuple[Product, int], float] = {}

    def rows(self, product: Product, form: str, group: int, tiles: dict[int, list[Skinny]]) -> list[Figures]:
        """Measures a product by the fastest of each number of tokens' tiles, of which the first is the engine's."""
        first = make_weight(product, form, group)
        count = max(1, math.ceil(_ROTATED_BYTES / first.nbytes))
        weights = [first, *(make_weight(product, form, group) for _ in range(count - 1))]
        return [self._row(product, form, weights, tokens, some) for tokens, some in tiles.items() if some]

    def _row(
        self, product: Product, form: str, weights: Sequence[PackedWeight], tokens: int, tiles: Sequence[Skinny]
    ) -> Figures:
        found: dict[Skinny, float] = {}
        for tile in tiles:
            try:
                found[tile] = packed_seconds(product, tokens, weights, tile)
            except Exception as error:  # a tile may need more shared memory or registers than there are
                print(f"{tile}: {error}".splitlines()[0])
        best = min(found, key=lambda tile: found[tile])
        if form != "fp8" and tokens <= TOKEN_TILES[-1]:
            shape = (FORMS[form][1], product.n, product.k, product.paired)
            sums = self._sums.setdefault((shape, bucket_of(tokens)), {})
            for tile, seconds in found.items():
                sums[tile] = sums.get(tile, 0.0) + seconds
        half, seconds = self._half_seconds(product, tokens), found[best]
        row: Figures = {
            "product": product.name, "form": form, "tokens": tokens, "us": round(seconds * 1e6, 2),
            "rule_us": round(found.get(tiles[0], math.nan) * 1e6, 2), "bf16_us": round(half * 1e6, 2),
            "times_bf16": round(half / seconds, 3),
            "share_of_copy": round(weights[0].nbytes / seconds / self.copy, 3), "tile": str(best),
        }  # fmt: skip
        if tokens >= _DEQUANTIZED_FROM:
            row["dequantized_us"] = round(dequantized_seconds(product, tokens, weights) * 1e6, 2)
        print(json.dumps(row), flush=True)
        return row

    def print_tuned(self) -> None:
        """Prints the lines for packed_tiles.py: the tiles that take the least for all sizes of a step together."""
        print("TUNED = {")
        for shape in dict.fromkeys(shape for shape, _ in self._sums):
            print(f"    {shape}: {{")
            for (owner, bucket), sums in self._sums.items():
                if owner == shape:
                    print(f"        {bucket}: {min(sums, key=lambda tile: sums[tile])},")
            print("    },")
        print("}")

    def _half_seconds(self, product: Product, tokens: int) -> float:
        if (product, tokens) not in self._half:
            plain = Weights(max(product.n * product.k, _ROTATED_BYTES // 2))
            fused = None if tokens > 128 else tile_for(tokens, product.n, product.k, product.paired, 2)
            self._half[product, tokens] = min(
                product_seconds(product, tokens, tile, plain, normed=False, pdl=overlaps_launches())
                for tile in dict.fromkeys((fused, None))
            )
        return self._half[product, tokens]


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
    parser.add_argument("--candidates", action="store_true", help="also other tiles than the engine's")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile")
    options = parser.parse_args()
    need_gpu()
    reserve_scratch(torch.device("cuda", torch.cuda.current_device()))
    products = model_of(options.shape, shape_config(options.shape)).products
    wanted = options.products or [each.name for each in products if not (options.scaled and each.name == "head")]
    products = tuple(each for each in products if each.name in wanted)
    copy, lines = _scaled(options, products) if options.scaled else _packed(options, products)
    print(json.dumps({"copy": copy, "products": lines}))


def _measured_copy() -> float:
    copy = copy_bandwidth()
    print(f"copy: {copy / 1e12:.3f} TB/s on {torch.cuda.get_device_name()}", flush=True)
    return copy


def _scaled(options: argparse.Namespace, products: Sequence[Product]) -> tuple[float, list[Figures]]:
    copy, lines = _measured_copy(), []
    for product in products:
        for form in options.forms or scaled_timing.FORMS:
            for tokens in options.tokens or scaled_timing.TOKENS:
                lines.append(scaled_timing.measure(product, form, tokens, candidates=options.candidates))
                print(json.dumps(lines[-1]), flush=True)
    return copy, lines


def _packed(options: argparse.Namespace, products: Sequence[Product]) -> tuple[float, list[Figures]]:
    sizes = options.tokens or (1, *TOKEN_TILES)
    groups = {form: options.group if form == "int4" else 0 for form in options.forms or FORMS}
    jobs = {
        (product, form, tokens): [
            PackedJob(product, tokens if tokens > TOKEN_TILES[-1] else bucket_of(tokens), form, group, tile)
            for tile in _tiles(product, tokens, form, group, options.candidates)
        ]
        for product in products
        for form, group in groups.items()
        for tokens in sizes
    }
    compilers = Compilers(options.workers)
    compilers.compile(job for some in jobs.values() for job in some)
    compilers.close()
    timing, lines = Timing(_measured_copy()), []
    for product in products:
        for form, group in groups.items():
            tiles = {
                tokens: [job.tile for job in jobs[product, form, tokens] if job in compilers.working]
                for tokens in sizes
            }
            lines += timing.rows(product, form, group, tiles)
    if options.candidates:
        timing.print_tuned()
    return timing.copy, lines


def _tiles(product: Product, tokens: int, form: str, group: int, others: bool) -> list[Skinny]:
    """Returns the engine's tile, and others if they are wanted and may differ between the forms of as many bits."""
    codes = torch.empty(1, product.k * FORMS[form][1] // 8, dtype=torch.uint8).view(FORMS[form][0])
    width = group or product.k
    columns = step_bytes(PackedWeight(codes, torch.empty(1, product.k // width), None, width))
    if others and form != "fp8" and tokens <= TOKEN_TILES[-1]:
        return list(candidates(product, tokens, form, columns))
    return [rule_of(product, tokens, form, columns)]


if __name__ == "__main__":
    main()
