"""The products of the chosen experts, and the sum over a token's experts.

In steps of several tokens a program multiplies a tile of tokens of one expert with rows of the expert's weights, which
are the left operand of `tl.dot`, as in `tandem/engine/kernels/linear`. The output of each of a token's experts is
rounded to the model's dtype and stored; a second kernel adds a token's outputs in the order of the ranks. There are no
atomics, so no token's result depends on another token.

In a step of one token, programs of a few rows multiply in float32, without tiles; those of the down product hold the
rows of all experts of the token and add their sums to the residual stream.

The numbers of experts and pairs are clamped where they are read, because the memory of trial steps is arbitrary
(tandem/engine/cuda/compile_ahead.py).
"""

import triton
import triton.language as tl

from tandem.engine.config.model import SWIGLU_ALPHA, SWIGLU_LIMIT
from tandem.engine.kernels.experts.triton_router import PAIRS_BASE
from tandem.engine.kernels.triton_launch import launch_dependents, wait_for_inputs
from tandem.engine.kernels.triton_math import gelu_tanh

SILU = tl.constexpr(0)
CLAMPED_SWIGLU = tl.constexpr(1)
RELU2 = tl.constexpr(2)
GELU_TANH = tl.constexpr(3)
ACTIVATIONS = {
    "silu": SILU.value,
    "clamped_swiglu": CLAMPED_SWIGLU.value,
    "relu2": RELU2.value,
    "gelu_tanh": GELU_TANH.value,
}
"""The values of `MixtureOfExperts.activation`."""

_ALPHA = tl.constexpr(SWIGLU_ALPHA)
_LIMIT = tl.constexpr(SWIGLU_LIMIT)


@triton.jit
def _activate(gate, up, ACTIVATION: tl.constexpr):
    """Return activation(gate) · up in float32, for one of `ACTIVATIONS`; with RELU2 max(0, gate)²."""
    if ACTIVATION == RELU2:
        positive = tl.maximum(gate, 0.0)
        return positive * positive
    if ACTIVATION == GELU_TANH:
        return gelu_tanh(gate) * up
    factor = gate
    if ACTIVATION == CLAMPED_SWIGLU:
        gate = tl.minimum(gate, _LIMIT)
        up = tl.minimum(tl.maximum(up, -_LIMIT), _LIMIT) + 1.0
        factor = gate * _ALPHA
    # Of the two forms of the sigmoid, use the one whose exponential cannot overflow.
    small = tl.exp(-tl.abs(factor))
    return gate * tl.where(factor >= 0, 1.0, small) / (1.0 + small) * up


@triton.jit
def _load_weight(pointers, inside, EVEN: tl.constexpr):
    """Load pointers [rows, columns] of a weight, with 0 for columns where the mask `inside` is False."""
    if EVEN:
        return tl.load(pointers)
    return tl.load(pointers, mask=inside[None, :], other=0.0)


@triton.jit
def tile_of(number, tiles, pairs, places, P, E: tl.constexpr, TOKENS: tl.constexpr):
    """Return a tile's expert, the tile's pairs [TOKENS], and a mask of the pairs that are present."""
    tile = tl.load(tiles + number)
    expert = tl.minimum(tl.maximum(tile // PAIRS_BASE, 0), E - 1).to(tl.int64)
    present = places < tile % PAIRS_BASE
    pair = tl.load(pairs + number * TOKENS + places, mask=present, other=0)
    return expert, tl.minimum(tl.maximum(pair, 0), P - 1).to(tl.int64), present


@triton.jit
def finish_tile(
    sums, sums_up, bias, weights, out, expert, pair, present, rows,
    N: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Store a tile's outputs from its sums [ROWS, TOKENS], see `tile_kernel`."""
    UP: tl.constexpr = GATED and ACTIVATION != RELU2
    if BIAS:
        bias_at = bias + expert * (2 * N if UP else N) + rows
        sums += tl.load(bias_at, mask=rows < N, other=0.0).to(tl.float32)[:, None]
        if UP:
            sums_up += tl.load(bias_at + N, mask=rows < N, other=0.0).to(tl.float32)[:, None]
    if GATED:
        sums = _activate(sums, sums_up, ACTIVATION)
    else:
        sums *= tl.load(weights + pair, mask=present, other=0.0)[None, :]
    out_at = out + pair[None, :] * N + rows[:, None]
    tl.store(out_at, sums.to(out.dtype.element_ty), mask=(rows < N)[:, None] & present[None, :])


@triton.jit(do_not_specialize=["P", "MAX_TILES", "first", "count"])
def tile_kernel(
    x, weight, bias, weights, tiles, pairs, out, P, MAX_TILES, first, count,
    N: tl.constexpr, K: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, GATED: tl.constexpr,
    ACTIVATION: tl.constexpr, BIAS: tl.constexpr, SOME: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of tokens by one expert's weight; grid (max_tiles, ceil(N / ROWS)).

    GATED: out [P, N] = activation(g) · u of x [P / TOP_K, K] and weight [E, 2·N, K], bias [E, 2·N];
           with RELU2, which has no gate: max(0, x · weightᵀ + bias)² of weight [E, N, K], bias [E, N];
    else:  out [P, N] = weights [P] · (x · weightᵀ + bias) of x [P, K] and weight [E, N, K], bias [E, N].

    tiles and pairs are as in `triton_router`; tiles of one expert are adjacent, and out is written for the pairs in
    `pairs`. With SOME, weight has only the `count` experts from `first` on, and only their tiles are computed.
    """
    EVEN: tl.constexpr = K % COLUMNS == 0
    UP: tl.constexpr = GATED and ACTIVATION != RELU2
    WEIGHT_ROWS: tl.constexpr = 2 * N if UP else N
    launch_dependents(PDL)
    number = tl.program_id(0)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    places = tl.arange(0, TOKENS)
    columns = tl.arange(0, COLUMNS)
    wait_for_inputs(PDL)
    if number < tl.load(tiles + MAX_TILES):
        expert, pair, present = tile_of(number, tiles, pairs, places, P, E, TOKENS)
        held_expert = expert
        if SOME:
            held_expert -= first
        if not SOME or (held_expert >= 0 and held_expert < count):
            x_at = x + (pair // TOP_K if GATED else pair)[:, None] * K
            weight_at = weight + (held_expert * WEIGHT_ROWS + tl.minimum(rows, N - 1))[:, None] * K
            sums = tl.zeros((ROWS, TOKENS), tl.float32)
            sums_up = tl.zeros((ROWS, TOKENS), tl.float32)
            for k in tl.range(0, K, COLUMNS):
                at = k + columns
                inside = at < K
                held = _load_weight(weight_at + at[None, :], inside, EVEN)
                taken = tl.trans(tl.load(x_at + at[None, :], mask=present[:, None] & inside[None, :], other=0.0))
                sums = tl.dot(held, taken, sums, input_precision="ieee")
                if UP:
                    held_up = _load_weight(weight_at + N * K + at[None, :], inside, EVEN)
                    sums_up = tl.dot(held_up, taken, sums_up, input_precision="ieee")
            finish_tile(sums, sums_up, bias, weights, out, expert, pair, present, rows, N, GATED, ACTIVATION, BIAS)


@triton.jit
def sum_kernel(
    parts, chosen, hidden,
    H: tl.constexpr, TOP_K: tl.constexpr, ALL_LOCAL: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add each token's rows of parts [T · TOP_K, H] to hidden [T, H]; grid (T, ceil(H / BLOCK)).

    Padding tokens keep their hidden state. Unless ALL_LOCAL, rows whose chosen expert is -1 are those of other ranks'
    experts, and are left out.
    """
    launch_dependents(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < H
    wait_for_inputs(PDL)
    computed = inside
    if ALL_LOCAL:
        computed = inside & (tl.load(chosen + token * TOP_K) >= 0)
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(TOP_K):
        if not ALL_LOCAL:
            computed = inside & (tl.load(chosen + token * TOP_K + rank) >= 0)
        total += tl.load(parts + (token * TOP_K + rank) * H + columns, mask=computed, other=0.0).to(tl.float32)
    hidden_at = hidden + token * H + columns
    if not ALL_LOCAL:
        computed = inside
    total += tl.load(hidden_at, mask=computed, other=0.0).to(tl.float32)
    tl.store(hidden_at, total.to(hidden.dtype.element_ty), mask=computed)


@triton.jit
def single_gate_up_kernel(
    x, weight, bias, chosen, out,
    N: tl.constexpr, K: tl.constexpr, X_STRIDE: tl.constexpr, E: tl.constexpr,
    ACTIVATION: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute out [TOP_K, N] = activation(g) · u of one token; grid (ceil(N / ROWS), TOP_K).

    The inputs are x [K] for all of the token's experts, or, if X_STRIDE is K, a row of x [TOP_K, K] for each.
    """
    EVEN: tl.constexpr = K % COLUMNS == 0
    UP: tl.constexpr = ACTIVATION != RELU2
    WEIGHT_ROWS: tl.constexpr = 2 * N if UP else N
    launch_dependents(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    rank = tl.program_id(1)
    columns = tl.arange(0, COLUMNS)
    wait_for_inputs(PDL)
    expert = tl.load(chosen + rank).to(tl.int64)
    if (expert >= 0) & (expert < E):
        weight_at = weight + (expert * WEIGHT_ROWS + tl.minimum(rows, N - 1))[:, None] * K
        gates = tl.zeros((ROWS, COLUMNS), tl.float32)
        ups = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in tl.static_range(0, K, COLUMNS):
            at = start + columns
            inside = at < K
            held = _load_weight(weight_at + at[None, :], inside, EVEN).to(tl.float32)
            taken = tl.load(x + rank * X_STRIDE + at, mask=inside, other=0.0).to(tl.float32)[None, :]
            gates += held * taken
            if UP:
                held_up = _load_weight(weight_at + N * K + at[None, :], inside, EVEN).to(tl.float32)
                ups += held_up * taken
        gate = tl.sum(gates, axis=1)
        up = tl.sum(ups, axis=1)
        if BIAS:
            bias_at = bias + expert * WEIGHT_ROWS + rows
            gate += tl.load(bias_at, mask=rows < N, other=0.0).to(tl.float32)
            if UP:
                up += tl.load(bias_at + N, mask=rows < N, other=0.0).to(tl.float32)
        active = _activate(gate, up, ACTIVATION)
        tl.store(out + rank * N + rows, active.to(out.dtype.element_ty), mask=rows < N)


@triton.jit
def single_down_kernel(
    x, weight, bias, weights, chosen, hidden,
    N: tl.constexpr, K: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add Σ weights · (x · weightᵀ + bias) of one token x [TOP_K, K] to hidden [N]; grid (ceil(N / ROWS),)."""
    launch_dependents(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    held_rows = tl.minimum(rows, N - 1)
    ranks = tl.arange(0, BLOCK_K)
    columns = tl.arange(0, COLUMNS)
    wait_for_inputs(PDL)
    expert = tl.load(chosen + ranks, mask=ranks < TOP_K, other=-1).to(tl.int64)
    there = (expert >= 0) & (expert < E)
    row = tl.where(there, expert, 0)[None, :] * N + held_rows[:, None]
    weight_at = weight + row[:, :, None] * K
    sums = tl.zeros((ROWS, BLOCK_K, COLUMNS), tl.float32)
    for start in tl.static_range(0, K, COLUMNS):
        at = start + columns
        loaded = there[:, None] & (at < K)[None, :]
        held = tl.load(weight_at + at[None, None, :], mask=loaded[None, :, :], other=0.0).to(tl.float32)
        taken = tl.load(x + ranks[:, None] * K + at[None, :], mask=loaded, other=0.0).to(tl.float32)
        sums += held * taken[None, :, :]
    products = tl.sum(sums, axis=2)
    if BIAS:
        products += tl.load(bias + row, mask=there[None, :], other=0.0).to(tl.float32)
    weighed = products * tl.load(weights + ranks, mask=there, other=0.0)[None, :]
    total = tl.sum(tl.where(there[None, :], weighed, 0.0), axis=1)
    total += tl.load(hidden + rows, mask=rows < N, other=0.0).to(tl.float32)
    tl.store(hidden + rows, total.to(hidden.dtype.element_ty), mask=rows < N)


@triton.jit
def shared_gate_kernel(
    x, gate, inner, H: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Multiply each row of inner [T, WIDTH] by sigmoid(x · gate) in place, x [T, H] and gate [H]; grid (T,)."""
    launch_dependents(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    wait_for_inputs(PDL)
    sums = tl.zeros((COLUMNS,), tl.float32)
    for start in tl.range(0, H, COLUMNS):
        at = start + columns
        taken = tl.load(x + token * H + at, mask=at < H, other=0.0).to(tl.float32)
        sums += taken * tl.load(gate + at, mask=at < H, other=0.0).to(tl.float32)
    logit = tl.sum(sums, axis=0)
    small = tl.exp(-tl.abs(logit))
    factor = tl.where(logit >= 0, 1.0, small) / (1.0 + small)
    for start in tl.range(0, WIDTH, COLUMNS):
        at = start + columns
        inner_at = inner + token * WIDTH + at
        value = tl.load(inner_at, mask=at < WIDTH, other=0.0).to(tl.float32) * factor
        tl.store(inner_at, value.to(inner.dtype.element_ty), mask=at < WIDTH)
