"""Measures a Triton product of prompts in two orders of its tiles, beside cuBLAS: `python -m benchmarks.kernels order`.

The product has tiles of 128 x 256 outputs and 64 columns of the sum. In row-major order, programs that run at the same
time share rows of the input and read many rows of the weight; in grouped order (`--group` rows of tiles, column by
column, as in Triton's tutorial of matrix products) they share both, and more of what they read is in L2. Times are of
the products of a layer at each number of prompt tokens, in bfloat16, on a heated chip, in turns.
"""

import argparse
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.command_line import Measured, at_least
from benchmarks.gpu_timing import matrix_rate, race
from benchmarks.kernels.dense_layer import dense_shapes, model_of, rank_shape
from benchmarks.results import run_facts

ROWS, COLUMNS, DEPTH = 128, 256, 64
TOKENS = (512, 2048, 8192)
_TOLERANCE = 0.02
"""Tolerated difference from cuBLAS, as a share of the largest output."""


@triton.jit
def _product(  # noqa: PLR0917
    x_ptr,
    weight_ptr,
    out_ptr,
    T,
    N,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Write a tile of x [T, K] · weight [N, K]ᵀ; programs are numbered column by column in groups of `GROUP` rows."""
    columns_of_tiles = tl.cdiv(N, COLUMNS)
    per_group = GROUP * columns_of_tiles
    group = tl.program_id(0) // per_group
    rows_in_group = tl.minimum(tl.cdiv(T, ROWS) - group * GROUP, GROUP)
    within = tl.program_id(0) % per_group
    row = group * GROUP + within % rows_in_group
    column = within // rows_in_group

    tokens = row * ROWS + tl.arange(0, ROWS)
    outputs = column * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    x_at = x_ptr + (tokens % T)[:, None].to(tl.int64) * K + depth[None, :]
    weight_at = weight_ptr + (outputs % N)[None, :].to(tl.int64) * K + depth[:, None]
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, K, DEPTH):
        left = K - start
        x = tl.load(x_at, mask=depth[None, :] < left, other=0.0)
        weight = tl.load(weight_at, mask=depth[:, None] < left, other=0.0)
        total = tl.dot(x, weight, total)
        x_at += DEPTH
        weight_at += DEPTH
    out_at = out_ptr + tokens[:, None].to(tl.int64) * N + outputs[None, :]
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=(tokens < T)[:, None] & (outputs < N)[None, :])


def tiled_product(x: Tensor, weight: Tensor, out: Tensor, group: int) -> None:
    """Compute out [T, N] = x [T, K] · weight [N, K]ᵀ; `group` rows of tiles are computed together, 1 = row-major."""
    (tokens, k), n = x.shape, weight.shape[0]
    tiles = math.ceil(tokens / ROWS) * math.ceil(n / COLUMNS)
    _product[(tiles,)](x, weight, out, tokens, n, k, ROWS, COLUMNS, DEPTH, group, num_warps=8, num_stages=3)


def product_row(x: Tensor, weight: Tensor, group: int) -> dict[str, object]:
    """Measure both orders and cuBLAS, and return TFLOP/s. Raises ValueError if an order is wrong."""
    out, expected = x.new_empty(len(x), len(weight)), x @ weight.t()
    orders = {"row_major": 1, "grouped": group}
    for name, size in orders.items():
        tiled_product(x, weight, out, size)
        off = (out - expected).abs().max().item() / expected.abs().max().item()
        if off > _TOLERANCE:
            raise ValueError(f"the {name} product is off by {off:.3f} of the largest output")
    contestants = {name: (lambda size=size: tiled_product(x, weight, out, size)) for name, size in orders.items()}
    times_us = race({**contestants, "cublas": lambda: torch.matmul(x, weight.t(), out=out)})
    flops = 2 * len(x) * weight.numel()
    return {f"{name}_tflops": round(flops / time_us / 1e6, 1) for name, time_us in times_us.items()}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this case."""
    parser.add_argument("--shape", choices=dense_shapes(), default="llama-3-8b")
    parser.add_argument("--tokens", type=at_least(1), nargs="+", default=list(TOKENS))
    parser.add_argument("--group", type=at_least(2), default=8, help="rows of tiles that are computed together")


def measure(options: argparse.Namespace) -> Measured:
    """Measure the products of a layer at each number of tokens."""
    matrix, rows = matrix_rate(), []
    for product in model_of(options.shape, rank_shape(options.shape, 1)).products:
        weight = torch.randn(product.n, product.k, device="cuda", dtype=torch.bfloat16) * product.k**-0.5
        for tokens in options.tokens:
            x = torch.randn(tokens, product.k, device="cuda", dtype=torch.bfloat16)
            rows.append({"product": product.name, "n": product.n, "k": product.k, "tokens": tokens})
            rows[-1] |= product_row(x, weight, options.group)
            print(rows[-1], flush=True)
    facts = {"shape": options.shape, "group": options.group, "dtype": "bfloat16", **run_facts("cuda")}
    return f"tile-order-{options.shape}", {"matrix_tflops": round(matrix / 1e12, 1), "rows": rows, **facts}
