"""Finds the tiles that stream weights fastest on this GPU, against cuBLAS and the copy bandwidth of the same run.

    python -m benchmarks.tuning.tune_linear [--models llama-3-8b qwen3-8b] [--tokens 1 16 32 64 128] [--early 512]
        [--save]

Prints lines for `TUNED` and `STREAMED_TOKENS` of tandem/engine/kernels/linear/triton_linear_tiles.py, then whole
decode chains in one CUDA graph with and without overlapped launches; the last line is JSON. Times are per product,
weights rotate through memory far larger than L2. All products are bfloat16.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.command_line import need_gpu
from benchmarks.gpu.ceilings import copy_bandwidth
from benchmarks.results import run_facts, save_result
from benchmarks.tuning.linear_candidates import Model, Product, candidates, model_of
from benchmarks.tuning.linear_compilers import Compilers, Job
from benchmarks.tuning.linear_timing import Found, Weights, chain_seconds, fastest, product_seconds
from tandem.engine.kernels.linear import triton_linear
from tandem.engine.kernels.linear.triton_linear_plan import TOKEN_TILES
from tandem.engine.kernels.linear.triton_linear_tiles import Tile
from tandem.engine.kernels.triton_launch import overlaps_launches
from tandem.engine.models.shapes import shape_config, shape_names

MODELS = ("llama-3-8b", "qwen3-0.6b", "llama-3.2-1b")
_LEAST_NUMBERS = 1 << 29
"""bfloat16 numbers that weights rotate through: 1 GiB."""


def tune(models: Sequence[Model], token_counts: Sequence[int], early: Sequence[int], workers: int) -> dict[str, object]:
    """Measures and prints everything; returns the result for JSON."""
    pdl = overlaps_launches()
    every = [(model, product, tokens) for model in models for product in model.products for tokens in token_counts]
    sizes = list(dict.fromkeys((product, tokens) for _, product, tokens in every))
    jobs = [Job(p, t, tile, p.normed, pdl) for p, t in sizes for tile in candidates(p, t, early)]
    compilers = Compilers(workers)
    compilers.compile(jobs)
    weights = Weights(max(_LEAST_NUMBERS, *(model.largest for model in models)))
    triton_linear.reserve_scratch(weights.memory.device)
    copy = copy_bandwidth()
    print(f"copy {copy / 1e9:.0f} GB/s")
    found: Found = {}
    for p, t in sizes:
        working = [job.tile for job in jobs if (job.product, job.tokens) == (p, t) and job in compilers.working]
        found[p, t] = fastest(p, t, working, weights, pdl=pdl)
    compilers.compile(Job(p, t, found[p, t], *v) for p, t in sizes for v in ((False, pdl), (p.normed, False)))
    compilers.close()
    table = _Table(weights, copy)
    rows = [table.row(model, p, t, found[p, t]) for model, p, t in every]
    chains = [table.chain_row(model, tokens, found) for model in models for tokens in token_counts]
    faster = {(p, t): row["us"] <= row["cublas_us"] for (_, p, t), row in zip(every, rows, strict=True)}
    _print_plan(found, faster)
    return {"copy_gb_per_s": copy / 1e9, "products": rows, "chains": chains}


def _print_plan(found: Found, faster: Mapping[tuple[Product, int], bool]) -> None:
    """Prints the lines for triton_linear_tiles.py; `faster`: True for products faster than cuBLAS."""
    tuned: dict[tuple[int, int, bool], dict[int, Tile]] = {}
    streamed: dict[tuple[int, int], int] = {}
    for (p, tokens), tile in found.items():
        bucket = 1 if tokens == 1 else next(size for size in TOKEN_TILES if tokens <= size)
        tuned.setdefault((p.n, p.k, p.paired), {})[bucket] = tile
        if faster[p, tokens]:
            streamed[p.n, p.k] = max(bucket, streamed.get((p.n, p.k), 0))
    print("\nTUNED = {")
    for shape, by_bucket in tuned.items():
        print(f"    {shape}: {{")
        for bucket, tile in by_bucket.items():
            print(f"        {bucket}: {tile},")
        print("    },")
    print(f"}}\nSTREAMED_TOKENS = {streamed}")


class _Table:
    """Prints measurements line by line, and returns them for JSON."""

    def __init__(self, weights: Weights, copy: float) -> None:
        """Sets the copy bandwidth, `copy`, in bytes per second."""
        self._weights = weights
        self._copy = copy

    def row(self, model: Model, product: Product, tokens: int, tile: Tile) -> dict[str, Any]:
        """Measures one product by its tile, with and without the norm, and by cuBLAS."""
        pdl = overlaps_launches()
        us = product_seconds(product, tokens, tile, self._weights, normed=product.normed, pdl=pdl) * 1e6
        plain_us = product_seconds(product, tokens, tile, self._weights, normed=False, pdl=pdl) * 1e6
        cublas_us = product_seconds(product, tokens, None, self._weights, normed=False, pdl=pdl) * 1e6
        rate = product.weight_bytes / us * 1e6
        print(
            f"{model.name:>12} {product.name:>8} {product.n:>6}x{product.k:<6} T {tokens:<4} {us:8.2f} us "
            f"{rate / 1e9:6.0f} GB/s  {rate / self._copy:5.3f} of copy  {cublas_us / us:5.2f}x cuBLAS  "
            f"(no norm {plain_us:.2f} us)  {tile}",
            flush=True,
        )
        facts = {"model": model.name, "product": product.name, "tokens": tokens, "tile": str(tile)}
        return facts | {"us": us, "plain_us": plain_us, "cublas_us": cublas_us, "of_copy": rate / self._copy}

    def chain_row(self, model: Model, tokens: int, found: Found) -> dict[str, object]:
        """Measures all products of a decode step, each reading the one before's output."""
        *layer, head = model.products
        total = sum(p.weight_bytes for p in layer) * model.layers + head.weight_bytes
        seconds = {"serial": chain_seconds(model, tokens, found, self._weights, pdl=False)}
        if overlaps_launches():
            seconds["overlapped"] = chain_seconds(model, tokens, found, self._weights, pdl=True)
        seconds["cublas"] = chain_seconds(model, tokens, None, self._weights, pdl=False)
        shown = "  ".join(
            f"{name} {s * 1e3:.3f} ms, {total / s / self._copy:.3f} of copy" for name, s in seconds.items()
        )
        print(f"{model.name:>12} chain T {tokens:<4} {shown}", flush=True)
        return {"model": model.name, "tokens": tokens} | {f"{name}_ms": s * 1e3 for name, s in seconds.items()}


def main() -> None:
    """Parses the arguments, tunes and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=shape_names(), default=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 16, 32, 64, 128], help="1 to 128")
    parser.add_argument("--early", nargs="+", type=int, default=[512], help="bytes of a row, multiples of 256, or 0")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile")
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results")
    arguments = parser.parse_args()
    need_gpu()
    models = [model_of(name, shape_config(name)) for name in arguments.models]
    result = tune(models, arguments.tokens, arguments.early, arguments.workers)
    result |= {"models": arguments.models, "dtype": "bfloat16", **run_facts("cuda")}
    if arguments.save:
        print("saved", save_result("tune-linear", result))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
