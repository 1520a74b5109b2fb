"""The kernels of `triton_linear`, where they are described: products of a few tokens and a streamed weight."""

import triton
import triton.language as tl

from tandem.engine.kernels.triton_launch import launch_dependents, wait_for_inputs
from tandem.engine.kernels.triton_math import gelu_tanh

STORE = tl.constexpr(0)
GATE_UP = tl.constexpr(1)
ADD = tl.constexpr(2)
"""The operations `OP` of a kernel: store the product, store activation(gate) · up, or add the product to the output."""

NO_NORM = tl.constexpr(0)
NORM_LAST = tl.constexpr(1)
NORM_FIRST = tl.constexpr(2)
"""The values of `NORM`: divide by the input's root mean square never, after the product, or before the product.

float16 cannot represent x ∘ norm for every x, so float16 inputs are divided before the product, which reads x twice.
"""

PREFETCH_BYTES = tl.constexpr(256)
"""Number of bytes of a weight row that one instruction prefetches into L2."""


@triton.jit
def _load_columns(pointers, columns, K, EVEN: tl.constexpr, POLICY: tl.constexpr):
    """Load from `pointers` [rows, columns]; columns from K on are 0."""
    if EVEN:
        return tl.load(pointers, eviction_policy=POLICY)
    return tl.load(pointers, mask=columns[None, :] < K, other=0.0, eviction_policy=POLICY)


@triton.jit
def fold(numbers, VECTOR: tl.constexpr):
    """Sum groups of VECTOR columns, [rows, columns] → [rows, columns / VECTOR], within a thread, without shuffles."""
    parts: tl.constexpr = numbers.shape[1] // VECTOR
    return tl.sum(tl.reshape(numbers, (numbers.shape[0], parts, VECTOR)), axis=2)


@triton.jit
def _gated(gate, up, GELU: tl.constexpr):
    """Return silu(gate) · up, or gelu(gate) · up if GELU."""
    if GELU:
        return gelu_tanh(gate) * up
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def gemv_kernel(
    x,
    norm,
    weight,
    bias,
    out,
    N,
    eps,
    K: tl.constexpr,
    OP: tl.constexpr,
    GELU: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    VECTOR: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply one token by a weight; grid (ceil(N / ROWS),), out [N], x [K], weight [N or, with GATE_UP, 2·N, K]."""
    EVEN: tl.constexpr = K % COLUMNS == 0
    launch_dependents(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < N
    columns = tl.arange(0, COLUMNS)
    held_rows = tl.minimum(rows, N - 1)
    first = weight + held_rows.to(tl.int64)[:, None] * K + columns[None, :]
    held = _load_columns(first, columns, K, EVEN, "evict_first")
    if OP == GATE_UP:
        second = weight + (held_rows + N).to(tl.int64)[:, None] * K + columns[None, :]
        held_up = _load_columns(second, columns, K, EVEN, "evict_first")
    norm_at = norm + columns[None, :]
    if NORM:
        scale = _load_columns(norm_at, columns, K, EVEN, "evict_last")
    total = tl.zeros((ROWS,), tl.float32)
    total_up = tl.zeros((ROWS,), tl.float32)
    if BIAS:
        total = tl.load(bias + rows, mask=inside, other=0.0).to(tl.float32)
        if OP == GATE_UP:
            total_up = tl.load(bias + N + rows, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    if OP == ADD:
        total += tl.load(out + rows, mask=inside, other=0.0).to(tl.float32)
    x_at = x + columns[None, :]
    sums = tl.zeros((ROWS, COLUMNS // VECTOR), tl.float32)
    sums_up = tl.zeros((ROWS, COLUMNS // VECTOR), tl.float32)
    squares = tl.zeros((1, COLUMNS // VECTOR), tl.float32)
    if K <= COLUMNS:
        wide = _load_columns(x_at, columns, K, EVEN, "evict_last").to(tl.float32)
        if NORM:
            squares = fold(wide * wide, VECTOR)
            wide *= scale.to(tl.float32)
        sums = fold(held.to(tl.float32) * wide, VECTOR)
        if OP == GATE_UP:
            sums_up = fold(held_up.to(tl.float32) * wide, VECTOR)
    else:
        for start in tl.range(0, K, COLUMNS):
            # The weights of the next round are loaded before this round's are multiplied, so that loads are always in
            # flight.
            later = columns + start + COLUMNS
            coming = tl.load(first + start + COLUMNS, mask=later[None, :] < K, other=0.0, eviction_policy="evict_first")
            wide = _load_columns(x_at + start, columns + start, K, EVEN, "evict_last").to(tl.float32)
            if NORM:
                squares += fold(wide * wide, VECTOR)
                wide *= scale.to(tl.float32)
                scale = tl.load(norm_at + start + COLUMNS, mask=later[None, :] < K, other=0.0)
            sums += fold(held.to(tl.float32) * wide, VECTOR)
            if OP == GATE_UP:
                coming_up = tl.load(
                    second + start + COLUMNS, mask=later[None, :] < K, other=0.0, eviction_policy="evict_first"
                )
                sums_up += fold(held_up.to(tl.float32) * wide, VECTOR)
                held_up = coming_up
            held = coming
    factor = 1.0
    if NORM:
        factor = tl.rsqrt(tl.sum(tl.sum(squares, axis=1), axis=0) / K + eps)
    total += tl.sum(sums, axis=1) * factor
    if OP == GATE_UP:
        total = _gated(total, total_up + tl.sum(sums_up, axis=1) * factor, GELU)
    tl.store(out + rows, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def call_into_l2(rows_at, start, K: tl.constexpr, EARLY: tl.constexpr):
    """Prefetch EARLY bytes of each weight row in `rows_at` [rows] into L2, from column `start` to at most column K."""
    step: tl.constexpr = PREFETCH_BYTES * 8 // rows_at.dtype.element_ty.primitive_bitwidth
    pieces = tl.minimum(start + tl.arange(0, EARLY // PREFETCH_BYTES) * step, K - step)
    addresses = (rows_at[:, None] + pieces[None, :]).to(tl.int64, bitcast=True)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], 256; mov.u32 $0, 0;",
        "=r,l",
        [addresses],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _finish(
    sums, sums_up, squares, bias, out, rows, tokens, T, N, eps,
    K: tl.constexpr, OP: tl.constexpr, GELU: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Apply norm, bias, and activation or residual to the sums [ROWS, TOKENS], and store the result in out [T, N]."""
    if NORM == NORM_LAST:
        factor = tl.rsqrt(squares / K + eps)[None, :]
        sums *= factor
        sums_up *= factor
    if BIAS:
        sums += tl.load(bias + rows, mask=rows < N, other=0.0).to(tl.float32)[:, None]
    if OP == GATE_UP:
        if BIAS:
            sums_up += tl.load(bias + N + rows, mask=rows < N, other=0.0).to(tl.float32)[:, None]
        sums = _gated(sums, sums_up, GELU)
    out_at = out + tokens.to(tl.int64)[None, :] * N + rows[:, None]
    inside = (rows[:, None] < N) & (tokens[None, :] < T)
    if OP == ADD:
        sums += tl.load(out_at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_at, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit
def finish_split(
    sums, sums_up, squares, bias, out, partials, counters, rows, tokens, split, T, N, eps,
    K: tl.constexpr, OP: tl.constexpr, GELU: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Store an output tile. If the tile is split, the last of its programs to arrive adds the sums of all, in order."""
    if SPLITS == 1:
        _finish(sums, sums_up, squares, bias, out, rows, tokens, T, N, eps, K, OP, GELU, NORM, BIAS)
    else:
        tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        area: tl.constexpr = ROWS * TOKENS
        slot: tl.constexpr = (2 if OP == GATE_UP else 1) * area + TOKENS
        within = tl.arange(0, ROWS)[:, None] + tl.arange(0, TOKENS)[None, :] * ROWS
        base = partials + tile.to(tl.int64) * (SPLITS * slot)
        slot_at = base + split * slot
        tl.store(slot_at + within, sums)
        if OP == GATE_UP:
            tl.store(slot_at + area + within, sums_up)
        if NORM == NORM_LAST:
            tl.store(slot_at + (slot - TOKENS) + tl.arange(0, TOKENS), squares)
        tl.debug_barrier()
        # The barrier before makes the stores of all warps come before the increment. The last program to arrive adds
        # the parts in a fixed order, so that the same inputs give the same bits, and leaves the counter at 0 for the
        # next launch.
        arrived = tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLITS - 1:
            sums = tl.zeros((ROWS, TOKENS), tl.float32)
            sums_up = tl.zeros((ROWS, TOKENS), tl.float32)
            squares = tl.zeros((TOKENS,), tl.float32)
            for part in tl.static_range(SPLITS):
                sums += tl.load(base + part * slot + within, cache_modifier=".cg")
                if OP == GATE_UP:
                    sums_up += tl.load(base + part * slot + area + within, cache_modifier=".cg")
                if NORM == NORM_LAST:
                    squares_at = base + part * slot + (slot - TOKENS) + tl.arange(0, TOKENS)
                    squares += tl.load(squares_at, cache_modifier=".cg")
            _finish(sums, sums_up, squares, bias, out, rows, tokens, T, N, eps, K, OP, GELU, NORM, BIAS)
            tl.store(counters + tile, 0)


@triton.jit(do_not_specialize=["T"])
def skinny_kernel(
    x,
    norm,
    weight,
    bias,
    out,
    partials,
    counters,
    T,
    N,
    eps,
    K: tl.constexpr,
    OP: tl.constexpr,
    GELU: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    VECTOR: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply some tokens by a weight; grid (ceil(N / ROWS), ceil(T / TOKENS), SPLITS).

    out [T, N]; x [T, K]; weight [N or, with GATE_UP, 2·N, K].

    partials  float32: SPLITS · (1 or 2) · ROWS · TOKENS sums and SPLITS · TOKENS squares of each output tile
    counters  int32: one for each output tile, 0 before and after the launch
    """
    EVEN: tl.constexpr = K % (COLUMNS * SPLITS) == 0
    STEPS: tl.constexpr = (K + COLUMNS * SPLITS - 1) // (COLUMNS * SPLITS)
    launch_dependents(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tokens = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    split = tl.program_id(2)
    columns = tl.arange(0, COLUMNS)
    start = split * (STEPS * COLUMNS)
    held_rows = tl.minimum(rows, N - 1)
    rows_at = weight + held_rows.to(tl.int64) * K
    up_rows_at = weight + (held_rows + N).to(tl.int64) * K
    if EARLY:
        call_into_l2(rows_at, start, K, EARLY)
        if OP == GATE_UP:
            call_into_l2(up_rows_at, start, K, EARLY)
    if NORM:
        scale = tl.load(norm + start + columns, mask=start + columns < K, other=0.0)
    wait_for_inputs(PDL)
    present = (tokens < T)[:, None]
    x_at = x + tokens.to(tl.int64)[:, None] * K
    factor = tl.zeros((TOKENS,), tl.float32)
    if NORM == NORM_FIRST:
        for k in tl.range(0, K, COLUMNS):
            at = k + columns
            wide = tl.load(x_at + at[None, :], mask=present & (at < K)[None, :], other=0.0).to(tl.float32)
            factor += tl.sum(wide * wide, axis=1)
        factor = tl.rsqrt(factor / K + eps)
    sums = tl.zeros((ROWS, TOKENS), tl.float32)
    sums_up = tl.zeros((ROWS, TOKENS), tl.float32)
    folded = tl.zeros((TOKENS, COLUMNS // VECTOR), tl.float32)
    for step in tl.range(0, STEPS):
        at = start + step * COLUMNS + columns
        held = _load_columns(rows_at[:, None] + at[None, :], at, K, EVEN, "evict_first")
        if EVEN:
            scaled = tl.load(x_at + at[None, :], mask=present, other=0.0)
        else:
            scaled = tl.load(x_at + at[None, :], mask=present & (at < K)[None, :], other=0.0)
        if NORM:
            wide = scaled.to(tl.float32)
            if NORM == NORM_LAST:
                folded += fold(wide * wide, VECTOR)
            else:
                wide *= factor[:, None]
            scaled = (wide * scale.to(tl.float32)[None, :]).to(x.dtype.element_ty)
            # The load is too narrow for the compiler's pipeline, so it is issued one step ahead here.
            scale = tl.load(norm + at + COLUMNS, mask=at + COLUMNS < K, other=0.0)
        right = tl.trans(scaled)
        sums = tl.dot(held, right, sums, input_precision="ieee")
        if OP == GATE_UP:
            held_up = _load_columns(up_rows_at[:, None] + at[None, :], at, K, EVEN, "evict_first")
            sums_up = tl.dot(held_up, right, sums_up, input_precision="ieee")
    squares = tl.sum(folded, axis=1)
    finish_split(
        sums, sums_up, squares, bias, out, partials, counters, rows, tokens, split, T, N, eps,
        K, OP, GELU, NORM, BIAS, ROWS, TOKENS, SPLITS,
    )  # fmt: skip
