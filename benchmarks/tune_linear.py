"""Which tiles stream weights fastest on this GPU, against cuBLAS and the copy bandwidth measured in the same run.

    python -m benchmarks.tune_linear [--models 8b 0.6b 1b] [--tokens 1 16 32 64 128] [--early 512]

Prints lines for `TUNED` and `STREAMED_TOKENS` of engine/kernels/triton_linear_tiles.py, then whole decode chains in one
CUDA graph with and without overlapped launches; the last line is JSON. Times are per product, weights rotate through
memory far larger than L2. All products are bfloat16.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor

from benchmarks.ceilings import copy_bandwidth, graph_seconds
from engine.kernels import triton_linear
from engine.kernels.triton_launch import overlaps_launches
from engine.kernels.triton_linear_plan import TOKEN_TILES, fits_scratch
from engine.kernels.triton_linear_tiles import Gemv, Skinny, Tile

STORE, GATE_UP, ADD = (int(op.value) for op in (triton_linear.STORE, triton_linear.GATE_UP, triton_linear.ADD))

_POOL_NUMBERS = 128256 * 4096 + (1 << 20)
"""bfloat16 numbers that all weights are views of: the largest weight fits, 1 GiB."""

_ROTATED_BYTES = 256 << 20
"""Weights one timed graph goes through at least: five times L2."""

_SHARED_MEMORY = 227 << 10
_MULTIPROCESSORS = 132
_SUMS_PER_WARP = 4096
"""float32 sums that a warp's registers hold beside everything else: 128 a thread."""

_SKINNY_TILES = {
    16: ((16, 256, 4, 4), (32, 128, 4, 4), (64, 128, 4, 4), (64, 256, 3, 4)),
    32: ((32, 128, 4, 4), (64, 128, 4, 4), (64, 64, 6, 4), (128, 64, 4, 8)),
    64: ((64, 128, 3, 4), (128, 64, 4, 4), (128, 64, 4, 8), (256, 64, 4, 8)),
    128: ((64, 64, 4, 4), (128, 64, 4, 8), (128, 128, 3, 8), (256, 64, 3, 8)),
}
"""By tokens: (rows, columns, stages, warps) worth trying."""

_EPS = 1e-5


@dataclass(frozen=True)
class Product:
    """One weight [n, k] of a model and what is done with it."""

    name: str
    n: int
    k: int
    op: int
    normed: bool

    @property
    def paired(self) -> bool:
        return self.op == GATE_UP

    @property
    def outputs(self) -> int:
        return self.n // 2 if self.paired else self.n

    @property
    def weight_bytes(self) -> int:
        return 2 * self.n * self.k


Found = dict[tuple[Product, int], Tile]
"""The fastest tile of each product and number of tokens."""


@dataclass(frozen=True)
class Model:
    """Layers of four products each, and the output layer."""

    name: str
    layers: int
    products: tuple[Product, ...]


def _model(name: str, *, layers: int, hidden: int, inner: int, qkv: int, attended: int, vocabulary: int) -> Model:
    products = (
        Product("qkv", qkv, hidden, STORE, normed=True),
        Product("o", hidden, attended, ADD, normed=False),
        Product("gate_up", 2 * inner, hidden, GATE_UP, normed=True),
        Product("down", hidden, inner, ADD, normed=False),
        Product("head", vocabulary, hidden, STORE, normed=True),
    )
    return Model(name, layers, products)


MODELS = {
    "8b": _model("8b", layers=32, hidden=4096, inner=14336, qkv=6144, attended=4096, vocabulary=128256),
    "0.6b": _model("0.6b", layers=28, hidden=1024, inner=3072, qkv=4096, attended=2048, vocabulary=151936),
    "1b": _model("1b", layers=16, hidden=2048, inner=8192, qkv=3072, attended=2048, vocabulary=128256),
}


def candidates(product: Product, tokens: int, early: Sequence[int]) -> list[Tile]:
    """A short list worth measuring for a step of `tokens`; `early`: bytes of each row called into L2 ahead."""
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
                if columns <= widest and wide_loads and 32 <= held <= 128 and programs >= 2 * _MULTIPROCESSORS:
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
    """The two smallest powers of two that give most multiprocessors a program, each with two steps or more."""
    fitting = [s for s in (1, 2, 4, 8) if steps >= 2 * s and (s == 1 or tiles * s <= 6 * _MULTIPROCESSORS)]
    full = [s for s in fitting if tiles * s >= 0.9 * _MULTIPROCESSORS]
    return full[:2] or fitting[-1:]


@lru_cache(maxsize=1)
def _pool() -> Tensor:
    """What every weight is a view of: small random numbers."""
    pool = torch.empty(_POOL_NUMBERS, dtype=torch.bfloat16, device="cuda")
    return pool.normal_(std=0.02)


def _weights(product: Product, count: int) -> list[Tensor]:
    """`count` views of the pool, far from each other as long as it lasts."""
    numbers = product.n * product.k
    places = max(1, _POOL_NUMBERS // numbers)
    return [
        _pool()[(i % places) * numbers : (i % places + 1) * numbers].view(product.n, product.k) for i in range(count)
    ]


@dataclass(frozen=True)
class Inputs:
    """What one product reads and writes beside its weight."""

    x: Tensor
    norm: Tensor | None
    out: Tensor


def _inputs(product: Product, tokens: int, normed: bool) -> Inputs:
    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, dtype=torch.bfloat16, device="cuda")

    norm = random(product.k) if normed else None
    return Inputs(random(tokens, product.k), norm, random(tokens, product.outputs))


def _launch(product: Product, inputs: Inputs, weight: Tensor, tile: Tile | None, pdl: bool) -> None:
    triton_linear.launch(inputs.x, inputs.norm, _EPS, weight, None, inputs.out, product.op, pdl=pdl, tile=tile)


@dataclass(frozen=True)
class Job:
    """One variant of a kernel: to compile, then to measure."""

    product: Product
    tokens: int
    tile: Tile
    normed: bool
    pdl: bool


def _compile_all(jobs: Sequence[Job]) -> list[str | None]:
    """In a process of its own: runs each job once on unwritten memory, which leaves it in Triton's cache on disk."""
    memory = torch.empty(_POOL_NUMBERS, dtype=torch.bfloat16, device="cuda")
    failures: list[str | None] = []
    for job in jobs:
        weight = memory[: job.product.n * job.product.k].view(job.product.n, job.product.k)
        try:
            _launch(job.product, _inputs(job.product, job.tokens, job.normed), weight, job.tile, job.pdl)
            torch.cuda.synchronize()
            failures.append(None)
        except Exception as error:
            failures.append(f"{type(error).__name__}: {str(error)[:120]}")
    return failures


class Compilers:
    """Processes that compile side by side; `working` holds every job that compiled and ran."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._processes = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
        self.working: set[Job] = set()

    def compile(self, jobs: Iterable[Job]) -> None:
        """Compiles the jobs and prints the ones that fail."""
        started, distinct = time.perf_counter(), list(dict.fromkeys(jobs))
        shares = [distinct[i :: self._workers] for i in range(self._workers)]
        for share, failures in zip(shares, self._processes.map(_compile_all, shares), strict=True):
            for job, failure in zip(share, failures, strict=True):
                if failure is None:
                    self.working.add(job)
                else:
                    print(f"left out: {job.product.name} {job.product.n}x{job.product.k} {job.tile}: {failure}")
        print(f"{len(distinct)} variants compiled in {time.perf_counter() - started:.0f} s", flush=True)

    def close(self) -> None:
        """Ends the processes."""
        self._processes.shutdown()


def _product_seconds(product: Product, tokens: int, tile: Tile | None, *, normed: bool, pdl: bool) -> float:
    """Seconds of one product by `tile`, or by cuBLAS (the bare product) where it is None."""
    count = max(4, math.ceil(_ROTATED_BYTES / product.weight_bytes))
    inputs = _inputs(product, tokens, normed)
    wide = torch.empty(tokens, product.n, dtype=torch.bfloat16, device="cuda")
    weights = _weights(product, count)
    calls = [_call(product, inputs, weight, wide, tile=tile, pdl=pdl) for weight in weights]
    return graph_seconds(lambda number: calls[number](), count)


def _fastest(product: Product, tokens: int, tiles: Sequence[Tile], pdl: bool) -> Tile:
    seconds = {tile: _product_seconds(product, tokens, tile, normed=product.normed, pdl=pdl) for tile in tiles}
    return min(seconds, key=lambda tile: seconds[tile])


def _chain_seconds(model: Model, tokens: int, found: Found | None, pdl: bool) -> float:
    """One decode step's products in one graph, each reading what the one before wrote; without `found` cuBLAS."""
    widest = max(max(p.n, p.k) for p in model.products)
    memory = [torch.randn(tokens * widest, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    norm = torch.ones(widest, dtype=torch.bfloat16, device="cuda")
    *layer, head = model.products
    offset, calls = 0, []
    for number, product in enumerate([*layer * model.layers, head]):
        numbers = product.n * product.k
        offset = 0 if offset + numbers > _POOL_NUMBERS else offset
        weight = _pool()[offset : offset + numbers].view(product.n, product.k)
        offset += numbers
        x, out = (memory[(number + side) % 2] for side in (0, 1))
        source = x[: tokens * product.k].view(tokens, product.k)
        wide = out[: tokens * product.n].view(tokens, product.n)
        narrow = out[: tokens * product.outputs].view(tokens, product.outputs)
        inputs = Inputs(source, norm[: product.k] if product.normed else None, narrow)
        tile = None if found is None else found[product, tokens]
        calls.append(_call(product, inputs, weight, wide, tile=tile, pdl=pdl))
    return len(calls) * graph_seconds(lambda number: calls[number](), len(calls))


def _call(
    product: Product, inputs: Inputs, weight: Tensor, wide: Tensor, *, tile: Tile | None, pdl: bool
) -> Callable[[], object]:
    if tile is None:
        return lambda: torch.matmul(inputs.x, weight.t(), out=wide)
    return lambda: _launch(product, inputs, weight, tile, pdl)


def _tune(
    models: Sequence[Model], token_counts: Sequence[int], early: Sequence[int], workers: int
) -> dict[str, object]:
    """Measures and prints everything; → the JSON result."""
    pdl = overlaps_launches()
    sizes = [(product, tokens) for model in models for product in model.products for tokens in token_counts]
    jobs = [Job(p, t, tile, p.normed, pdl) for p, t in sizes for tile in candidates(p, t, early)]
    compilers = Compilers(workers)
    compilers.compile(jobs)
    triton_linear.reserve_scratch(_pool().device)
    copy = copy_bandwidth()
    print(f"copy {copy / 1e9:.0f} GB/s")
    found: Found = {}
    for p, t in sizes:
        working = [job.tile for job in jobs if (job.product, job.tokens) == (p, t) and job in compilers.working]
        found[p, t] = _fastest(p, t, working, pdl)
    compilers.compile(Job(p, t, found[p, t], *v) for p, t in sizes for v in ((False, pdl), (p.normed, False)))
    compilers.close()
    rows = [_row(model, p, t, found[p, t], copy) for model in models for p in model.products for t in token_counts]
    chains = [_chain_row(model, tokens, found, copy) for model in models for tokens in token_counts]
    _print_plan(found, rows)
    return {"copy_gb_s": copy / 1e9, "products": rows, "chains": chains}


def _print_plan(found: Found, rows: Sequence[dict[str, Any]]) -> None:
    """Prints what to paste into triton_linear_tiles.py."""
    tuned: dict[tuple[int, int, bool], dict[int, Tile]] = {}
    streamed: dict[tuple[int, int], int] = {}
    for ((p, tokens), tile), row in zip(found.items(), rows, strict=True):
        bucket = 1 if tokens == 1 else next(size for size in TOKEN_TILES if tokens <= size)
        tuned.setdefault((p.n, p.k, p.paired), {})[bucket] = tile
        if row["us"] <= row["cublas_us"]:
            streamed[p.n, p.k] = max(bucket, streamed.get((p.n, p.k), 0))
    print("\nTUNED = {")
    for shape, by_bucket in tuned.items():
        print(f"    {shape}: {{")
        for bucket, tile in by_bucket.items():
            print(f"        {bucket}: {tile},")
        print("    },")
    print(f"}}\nSTREAMED_TOKENS = {streamed}")


def _row(model: Model, product: Product, tokens: int, tile: Tile, copy: float) -> dict[str, Any]:
    pdl = overlaps_launches()
    us = _product_seconds(product, tokens, tile, normed=product.normed, pdl=pdl) * 1e6
    plain_us = _product_seconds(product, tokens, tile, normed=False, pdl=pdl) * 1e6
    cublas_us = _product_seconds(product, tokens, None, normed=False, pdl=pdl) * 1e6
    rate = product.weight_bytes / us * 1e6
    print(
        f"{model.name:>5} {product.name:>8} {product.n:>6}x{product.k:<6} T {tokens:<4} {us:8.2f} us "
        f"{rate / 1e9:6.0f} GB/s  {rate / copy:5.3f} of copy  {cublas_us / us:5.2f}x cuBLAS  "
        f"(no norm {plain_us:.2f} us)  {tile}",
        flush=True,
    )
    facts = {"model": model.name, "product": product.name, "tokens": tokens, "tile": str(tile)}
    return facts | {"us": us, "plain_us": plain_us, "cublas_us": cublas_us, "of_copy": rate / copy}


def _chain_row(model: Model, tokens: int, found: Found, copy: float) -> dict[str, object]:
    *layer, head = model.products
    total = sum(p.weight_bytes for p in layer) * model.layers + head.weight_bytes
    seconds = {"serial": _chain_seconds(model, tokens, found, False)}
    if overlaps_launches():
        seconds["overlapped"] = _chain_seconds(model, tokens, found, True)
    seconds["cublas"] = _chain_seconds(model, tokens, None, False)
    shown = "  ".join(f"{name} {s * 1e3:.3f} ms, {total / s / copy:.3f} of copy" for name, s in seconds.items())
    print(f"{model.name:>5} chain T {tokens:<4} {shown}", flush=True)
    return {"model": model.name, "tokens": tokens} | {f"{name}_ms": s * 1e3 for name, s in seconds.items()}


def main() -> None:
    """Parses the arguments, tunes, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 16, 32, 64, 128], help="1 to 128")
    parser.add_argument("--early", nargs="+", type=int, default=[512], help="bytes of a row, multiples of 256, or 0")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile")
    arguments = parser.parse_args()
    result = _tune([MODELS[name] for name in arguments.models], arguments.tokens, arguments.early, arguments.workers)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
