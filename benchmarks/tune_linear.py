"""Which tiles stream weights fastest on this GPU, against cuBLAS and the copy bandwidth measured in the same run.

    python -m benchmarks.tune_linear [--models 8b 0.6b 1b] [--tokens 1 16 32 64 128] [--workers 12]

Prints lines for `TUNED` and `STREAMED_TOKENS` of engine/kernels/triton_linear_plan.py, then whole decode chains in one
CUDA graph with and without overlapped launches; the last line is JSON. Times are per product, weights rotate through
memory far larger than L2. All products are bfloat16.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context

import torch
from torch import Tensor

from engine.kernels import triton_linear
from engine.kernels.triton_launch import overlaps_launches
from engine.kernels.triton_linear_plan import SCRATCH_COUNTERS, SCRATCH_FLOATS, TOKEN_TILES, Gemv, Skinny, Tile

STORE, GATE_UP, ADD = (op.value for op in (triton_linear.STORE, triton_linear.GATE_UP, triton_linear.ADD))

_POOL_NUMBERS = 128256 * 4096 + (1 << 20)
"""bfloat16 numbers that all weights are views of: the largest weight fits, 1 GiB."""

_ROTATED_BYTES = 256 << 20
"""Weights one timed graph goes through at least: five times L2."""

_SHARED_MEMORY = 227 << 10
_MULTIPROCESSORS = 132
_REPLAYS = 7
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


@dataclass(frozen=True)
class Model:
    """Layers of four products each, and the output layer."""

    name: str
    layers: int
    products: tuple[Product, ...]


def _model(name: str, layers: int, hidden: int, inner: int, qkv: int, attended: int, vocabulary: int) -> Model:
    products = (
        Product("qkv", qkv, hidden, STORE, normed=True),
        Product("o", hidden, attended, ADD, normed=False),
        Product("gate_up", 2 * inner, hidden, GATE_UP, normed=True),
        Product("down", hidden, inner, ADD, normed=False),
        Product("head", vocabulary, hidden, STORE, normed=True),
    )
    return Model(name, layers, products)


MODELS = {
    "8b": _model("8b", 32, 4096, 14336, 6144, 4096, 128256),
    "0.6b": _model("0.6b", 28, 1024, 3072, 4096, 2048, 151936),
    "1b": _model("1b", 16, 2048, 8192, 3072, 2048, 128256),
}


def candidates(product: Product, tokens: int) -> list[Tile]:
    """A short list worth measuring for a step of `tokens`."""
    if tokens == 1:
        return list(_gemv_candidates(product))
    return list(_skinny_candidates(product, tokens))


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


def _skinny_candidates(product: Product, tokens: int) -> Iterable[Skinny]:
    bucket = next(tile for tile in TOKEN_TILES if tokens <= tile)
    factor = 2 if product.paired else 1
    for rows, warps in ((16, 4), (32, 4), (64, 4), (128, 4), (128, 8), (256, 8)):
        tiles = math.ceil(product.outputs / rows)
        if rows < min(bucket, 64) // 2 or rows * bucket * factor > 16384 * warps // 4:
            continue
        for columns, stages in ((64, 4), (64, 6), (128, 3), (128, 4), (256, 3)):
            smem = 2 * columns * (rows * factor + bucket) * stages
            for splits in (1, 2, 4, 8):
                programs = tiles * splits
                if smem > _SHARED_MEMORY or smem < 24 << 10 or tiles > SCRATCH_COUNTERS * splits:
                    continue
                if product.k // splits < 2 * columns or programs * rows * bucket * factor * 1.1 > SCRATCH_FLOATS > 0 < splits - 1:
                    continue
                if programs < _MULTIPROCESSORS * 0.9 or (splits > 1 and programs > 6 * _MULTIPROCESSORS):
                    continue
                yield Skinny(rows, bucket, columns, splits, stages, warps, early=512)
