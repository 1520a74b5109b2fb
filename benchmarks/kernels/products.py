"""Measures and tunes the weight-streaming products of a model: `python -m benchmarks.kernels products [--candidates]`.

For each product, form of weights and number of tokens, it prints the bandwidth of the engine's tile (with
`--candidates`, of the fastest of several tiles) as a share of the copy bandwidth in the same run, and the times of
other ways to compute the product. A last table has the time of a layer's products in each form and its ratio to that
in bfloat16. With `--candidates` it prints lines for `TUNED` and `STREAMED_TOKENS` of
tandem/engine/kernels/linear/triton_linear_tiles.py, and for `TUNED` of packed_tiles.py and w4a8_tiles.py in
tandem/engine/kernels/packed. Weights rotate through memory far larger than L2.
"""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.command_line import Measured, at_least
from benchmarks.gpu_timing import copy_bandwidth
from benchmarks.kernels.compilers import compiled
from benchmarks.kernels.dense_layer import Product, dense_shapes, model_of, rank_shape
from benchmarks.kernels.product_forms import FORMS, Job, rotated, us_of
from benchmarks.results import run_facts
from tandem.engine.kernels.linear.triton_linear import reserve_scratch

TOKENS = (1, 16, 32, 64, 128)
_TUNED = ("bfloat16", "int8", "int4", "w4a8", "w4a8-groups", "scaled-fp8")
"""The forms that the engine's tables are tuned with; fp8 uses the tiles of int8."""
_OTHER_WAYS = ("cublas_us", "dequantized_us", "library_us")
"""Times of other ways to compute the same product."""

Row = dict[str, Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this case."""
    parser.add_argument("--models", nargs="+", choices=dense_shapes(), default=["llama-3-8b"])
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=list(FORMS))
    parser.add_argument("--products", nargs="+", help="qkv, o, gate_up, down, head (all)")
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--tensor-parallel-size", type=at_least(1), default=1, help="ranks that divide the model")
    parser.add_argument(
        "--candidates", nargs="*", choices=list(FORMS), help="also other tiles than the engine's, of these forms (all)"
    )
    parser.add_argument("--workers", type=int, default=12, help="processes that compile")


def measure(options: argparse.Namespace) -> Measured:
    """Measure all products, and print the tables of the fastest tiles."""
    reserve_scratch(torch.device("cuda", torch.cuda.current_device()))
    products = dict.fromkeys(
        product
        for name in options.models
        for product in model_of(name, rank_shape(name, options.tensor_parallel_size)).products
        if not options.products or product.name in options.products
    )
    tuned = options.forms if options.candidates == [] else options.candidates or []
    jobs = [
        Job(product, form, tokens, tile)
        for product in products
        for form in options.forms
        for tokens in options.tokens
        for tile in FORMS[form].tiles(product, tokens, others=form in tuned)
    ]
    # A kernel is the same for all numbers of tokens with the same tile, so it is compiled once.
    kernels = {job.kernel: job for job in jobs}
    compiling = {job.kernel for job in compiled(list(kernels.values()), options.workers)}
    working = [job for job in jobs if job.kernel in compiling]
    copy = copy_bandwidth()
    print(f"copy: {copy / 1e12:.3f} TB/s on {torch.cuda.get_device_name()}", flush=True)
    rows = [row for product in products for form in options.forms for row in _rows(product, form, working, copy)]
    _print_tables([row for row in rows if row["form"] in tuned])
    _print_least_tokens(rows)
    _print_layers(rows)
    for row in rows:
        row["tile"] = str(row["tile"])
    facts = {"models": options.models, "dtype": "-".join(options.forms), **run_facts("cuda")}
    return "tune-products", {"copy_gb_per_s": copy / 1e9, "products": rows, **facts}


def _rows(product: Product, form: str, jobs: Sequence[Job], copy: float) -> list[Row]:
    """Return and print one row per number of tokens."""
    jobs = [job for job in jobs if (job.product, job.form) == (product, form)]
    kind, rows = FORMS[form], []
    weights = rotated(kind, product)
    for tokens in dict.fromkeys(job.tokens for job in jobs):
        inputs = kind.inputs(product, tokens)
        some = [job for job in jobs if job.tokens == tokens]
        took = {job: us_of(partial(kind.launch, product, inputs, job.tile), weights) for job in some}
        best = min(took, key=lambda job: took[job])
        row = {
            "product": product.name,
            "shape": (product.n, product.k, product.paired),
            "form": form,
            "tokens": tokens,
            "bucket": best.bucket,
            "us": took[best],
            "engine_us": next(iter(took.values())),
            "share_of_copy": round(weights[0].nbytes / took[best] / copy * 1e6, 3),
            **kind.beside(product, tokens, weights),
            "tile": best.tile,
        }
        print(json.dumps(row | {"tile": str(best.tile)}), flush=True)
        rows.append(row)
    return rows


def _print_tables(rows: Sequence[Row]) -> None:
    """Print the fastest tiles by shape and bucket. If several steps share a bucket, the largest step decides."""
    for form in dict.fromkeys(row["form"] for row in rows if row["form"] in _TUNED):
        tuned: dict[tuple[int, int, bool], dict[int, Any]] = {}
        streamed: dict[tuple[int, int], int] = {}
        for row in (row for row in rows if row["form"] == form):
            tuned.setdefault(row["shape"], {})[row["bucket"]] = row["tile"]
            if row["us"] <= row.get("cublas_us", 0.0):
                streamed[row["shape"][:2]] = row["bucket"]
        print(f"\n{form}: TUNED = {{")
        for shape, by_bucket in tuned.items():
            tiles = "\n".join(f"        {bucket}: {tile}," for bucket, tile in by_bucket.items())
            print(f"    {shape}: {{\n{tiles}\n    }},")
        print("}", *([f"\nSTREAMED_TOKENS = {streamed}"] if streamed else []))


def _print_least_tokens(rows: Sequence[Row]) -> None:
    """Print, for 4-bit weights, the sizes of steps from which 8-bit inputs are faster, and from which the library is.

    A size counts if all measured larger sizes are faster, too; None if not even the largest is.
    """

    def least(shape: object, form: str, faster: Callable[[Row, Row], bool]) -> int | None:
        found = None
        for tokens in sorted({tokens for _, _, tokens in by_size}, reverse=True):
            pair = by_size.get(("int4", shape, tokens)), by_size.get((form, shape, tokens))
            if None in pair or not faster(*pair):  # type: ignore[arg-type]
                break
            found = tokens
        return found

    by_size = {(row["form"], row["shape"], row["tokens"]): row for row in rows}
    for form in ("w4a8", "w4a8-groups"):
        for shape in dict.fromkeys(row["shape"] for row in rows if row["form"] == form):
            narrow = least(shape, form, lambda plain, row: _fastest(row) <= _fastest(plain))
            library = least(shape, form, lambda _, row: row.get("library_us", math.inf) <= row["us"])
            print(f"{form}: LEAST_TOKENS {shape[:2]}: ({narrow}, {library}),")


def _fastest(row: Row) -> float:
    return float(min(row["us"], *(row[way] for way in _OTHER_WAYS if way in row), row["us"]))


def _print_layers(rows: Sequence[Row]) -> None:
    """Print the fastest way's time of each product and of a layer, without the output layer, by form and tokens."""
    layers: dict[tuple[str, int], dict[str, float]] = {}
    for row in rows:
        products = layers.setdefault((row["form"], row["tokens"]), {})
        products[f"{row['product']} {row['shape']}"] = _fastest(row)
    print("\nform, tokens: µs of each product by its fastest way; of a layer; times as fast as bfloat16")
    for (form, tokens), products in layers.items():
        layer, plain = (
            sum(time for name, time in one.items() if not name.startswith("head"))
            for one in (products, layers.get(("bfloat16", tokens), {}))
        )
        times = ", ".join(f"{name.split()[0]} {time:.1f}" for name, time in products.items())
        print(f"{form}, {tokens}: {times}; layer {layer:.1f}; {plain / layer if plain and layer else 0:.2f}")
