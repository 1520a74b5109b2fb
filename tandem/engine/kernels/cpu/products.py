"""Matrix products of the CPU kernels, and the operations fused with them; a chunk is some weight rows and all tokens.

Every output is a dot product in the order of accumulation of `tiles._dot_tile`, so it depends neither on the other
tokens of the step nor on how the work is divided. Tokens come in blocks of eight, because sixteen accumulators (two
weight rows by eight tokens) keep the multipliers busy with ten loads. A chunk's weights are read from memory once, and
are in the L2 cache for the following blocks. Products of packed weights quantize their input first (`code_tiles.py`)
and sum in the same order for any number of tokens. PyTorch computes the products of many tokens with other
weights (`long_products.py`).
"""

import math
import struct

import numpy as np

from tandem.engine.kernels.cpu.code_tiles import code_rows, quantize_row, row_code_bytes
from tandem.engine.kernels.cpu.ir import LANES
from tandem.engine.kernels.cpu.pool import argument, inlined, real
from tandem.engine.kernels.cpu.tiles import BLOCK, dot_rows
from tandem.engine.kernels.cpu.vector import (
    add_row,
    gate_row,
    gelu_row,
    item_bytes,
    norm_row,
    scale_row,
    squares_of,
    wide_norm_row,
)
from tandem.engine.kernels.held_weight import CODES_A_BLOCK

F32 = np.float32(0)
"""The `tag` (see `ir.py`) of float32 elements."""
F32_BYTES = 4
TOKENS_A_CHUNK = 16
"""Number of tokens in a chunk, in jobs that process token by token."""
MAX_CHUNK_ROWS = 256
"""Maximum number of weight rows in a chunk: twice the outputs of a block must fit a thread's scratch memory."""

CODE_BITS, ROWS_A_CHUNK, TOKENS, K, X, OUT, WEIGHT, BIAS, ROWS, ADDS, SOURCE, NORM_WEIGHT, WIDE_NORM, GELU, EPS = range(
    1, 16
)
"""Indices of the arguments of a product out = x · weightᵀ + bias, or out += x · weightᵀ + bias if `adds` is 1.

x [tokens, k] is RMSNorm of `source`, or unchanged input if `norm_weight` is 0. `rows` is the number of rows of the
weight, or of each half for gate and up. `bias` is 0 if there is none. `wide_norm` is 1 if the norm's weight is float32,
for a model of any dtype. `gelu` is 1 if the activation is GELU, 0 if it is SiLU. `code_bits` is 0, or the bits of a
packed weight's codes.
"""
PRODUCT = struct.Struct("=15qd")
SCALES, OFFSETS, FACTORS, GROUP_BLOCKS, X_CODES, X_SCALES, X_SUMS = range(16, 23)
"""Indices of the additional arguments of a product with a packed weight, see `code_tiles.code_rows`."""
CODE_PRODUCT = struct.Struct("=15qd7q")


@inlined
def norm_chunk(shared, chunk, scratch, tag):  # type: ignore[no-untyped-def]
    """Compute x = RMSNorm(source) for the chunk's tokens, rounded to the model's dtype, and quantize it if needed."""
    source, x, tokens, k = argument(shared, SOURCE), argument(shared, X), argument(shared, TOKENS), argument(shared, K)
    norm, eps = argument(shared, NORM_WEIGHT), real(shared, EPS)
    for token in range(chunk * TOKENS_A_CHUNK, min((chunk + 1) * TOKENS_A_CHUNK, tokens)):
        start = token * k * item_bytes(tag)
        if norm != 0:
            factor = norm_factor(source + start, eps, k, tag)
            if argument(shared, WIDE_NORM) != 0:
                wide_norm_row(source + start, factor, norm, x + start, k, tag)
            else:
                norm_row(source + start, factor, norm, x + start, k, tag)
        if argument(shared, CODE_BITS) != 0:
            codes, before = argument(shared, X_CODES) + token * row_code_bytes(k), token * (k // CODES_A_BLOCK) * 4
            scales, sums = argument(shared, X_SCALES) + before, argument(shared, X_SUMS) + before
            quantize_row(x + start, codes, scales, sums, k, tag)


@inlined
def norm_factor(source, eps, n, tag):  # type: ignore[no-untyped-def]
    """Return 1 / sqrt(mean(source²) + eps) of n elements of type `tag`."""
    return np.float32(1.0) / math.sqrt(squares_of(source, n, tag) / np.float32(n) + eps)


@inlined
def _code_rows(shared, row, n, token, tokens, out, out_stride, tag):  # type: ignore[no-untyped-def]
    """Compute the products of n rows of a packed weight with `tokens` tokens from `token` on.

    The first row, `row`, begins a panel.
    """
    k = argument(shared, K)
    before = token * (k // CODES_A_BLOCK) * 4
    code_rows(
        argument(shared, CODE_BITS), argument(shared, WEIGHT), argument(shared, SCALES), argument(shared, OFFSETS),
        argument(shared, FACTORS), row // LANES, _padded(n) // LANES, k, argument(shared, GROUP_BLOCKS),
        argument(shared, X_CODES) + token * row_code_bytes(k), argument(shared, X_SCALES) + before,
        argument(shared, X_SUMS) + before, tokens, out, out_stride, tag,
    )  # fmt: skip


@inlined
def _padded(rows):  # type: ignore[no-untyped-def]
    return (rows + LANES - 1) // LANES * LANES


@inlined
def linear_chunk(shared, chunk, scratch, tag):  # type: ignore[no-untyped-def]
    """Compute the outputs of the chunk's weight rows for all tokens."""
    x, tokens, weight = argument(shared, X), argument(shared, TOKENS), argument(shared, WEIGHT)
    k, step = argument(shared, K), argument(shared, ROWS_A_CHUNK)
    first, stride = chunk * step, k * item_bytes(tag)
    n = min(step, argument(shared, ROWS) - first)
    if argument(shared, CODE_BITS) != 0:
        y_stride = _padded(n) * F32_BYTES
        for t in range(0, tokens, BLOCK):
            block = min(BLOCK, tokens - t)
            _code_rows(shared, first, n, t, block, scratch, y_stride, tag)
            for i in range(block):
                _finish_linear(shared, scratch + i * y_stride, t + i, first, n, tag)
        return
    weight += first * stride
    for t in range(0, tokens, BLOCK):
        block = min(BLOCK, tokens - t)
        dot_rows(weight, stride, n, x + t * stride, stride, block, k, scratch, n * F32_BYTES, tag)
        for i in range(block):
            _finish_linear(shared, scratch + i * n * F32_BYTES, t + i, first, n, tag)


@inlined
def _finish_linear(shared, y, token, first, n, tag):  # type: ignore[no-untyped-def]
    """Add bias and residual to n outputs of one token, from row `first` on, and store them."""
    out, bias = argument(shared, OUT), argument(shared, BIAS)
    target = out + (token * argument(shared, ROWS) + first) * item_bytes(tag)
    if bias != 0:
        add_row(y, bias + first * item_bytes(tag), n, tag)
    if argument(shared, ADDS) != 0:
        add_row(y, target, n, tag)
    scale_row(y, np.float32(1.0), target, n, tag)


@inlined
def gate_up_chunk(shared, chunk, scratch, tag):  # type: ignore[no-untyped-def]
    """Compute activation(g) · u for one chunk of output rows and all tokens.

    [g | u] is the product of the inputs and the stacked gate and up weights.
    """
    x, tokens, rows = argument(shared, X), argument(shared, TOKENS), argument(shared, ROWS)
    k, step = argument(shared, K), argument(shared, ROWS_A_CHUNK)
    first, stride = chunk * step, k * item_bytes(tag)
    n = min(step, rows - first)
    if argument(shared, CODE_BITS) != 0:
        y_stride = _padded(n) * F32_BYTES
        ups = scratch + BLOCK * y_stride
        for t in range(0, tokens, BLOCK):
            block = min(BLOCK, tokens - t)
            _code_rows(shared, first, n, t, block, scratch, y_stride, tag)
            _code_rows(shared, rows + first, n, t, block, ups, y_stride, tag)
            for i in range(block):
                _finish_gate_up(shared, scratch + i * y_stride, ups + i * y_stride, t + i, first, n, tag)
        return
    gate = argument(shared, WEIGHT) + first * stride
    up = gate + rows * stride
    y_stride = n * F32_BYTES
    ups = scratch + BLOCK * y_stride
    for t in range(0, tokens, BLOCK):
        block, xs = min(BLOCK, tokens - t), x + t * stride
        dot_rows(gate, stride, n, xs, stride, block, k, scratch, y_stride, tag)
        dot_rows(up, stride, n, xs, stride, block, k, ups, y_stride, tag)
        for i in range(block):
            _finish_gate_up(shared, scratch + i * y_stride, ups + i * y_stride, t + i, first, n, tag)


@inlined
def _finish_gate_up(shared, gate, up, token, first, n, tag):  # type: ignore[no-untyped-def]
    """Add the bias to n gate sums and n up sums of one token, from row `first` on, and store activation(gate) · up."""
    bias, rows = argument(shared, BIAS), argument(shared, ROWS)
    if bias != 0:
        add_row(gate, bias + first * item_bytes(tag), n, tag)
        add_row(up, bias + (rows + first) * item_bytes(tag), n, tag)
    target = argument(shared, OUT) + (token * rows + first) * item_bytes(tag)
    if argument(shared, GELU) != 0:
        gelu_row(gate, up, target, n, tag)
    else:
        gate_row(gate, up, target, n, tag)
