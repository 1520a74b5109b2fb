"""The kernels of `scaled_products`: quantization of inputs token by token, and products of 8-bit codes."""

import triton
import triton.language as tl

from tandem.engine.kernels.linear.triton_activation import gated
from tandem.engine.kernels.linear.triton_linear_kernels import ADD, GATE_UP, NO_NORM, call_into_l2, finish_split, fold
from tandem.engine.kernels.triton_launch import launch_dependents, wait_for_inputs
from tandem.engine.kernels.triton_math import LARGEST_FP8, LARGEST_INT8, as_codes


@triton.jit
def _to_codes(most, largest):
    """Return the factor largest / most of each group: values times this factor have magnitudes of at most `largest`.

    `most` [groups] is the largest magnitude in each group; 0 counts as 1.
    """
    return tl.div_rn(tl.zeros_like(most) + largest, tl.where(most > 0, most, 1.0))


@triton.jit
def quantize_kernel(
    x,
    norm,
    codes,
    scales,
    totals,
    eps,
    stride,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    TOTAL: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Quantize RMSNorm(x), x itself, or with GATED activation(g) · u of x = [g | u] [T, 2·K]; grid (T,).

    The gated activation is rounded to x's dtype first, because other products store it rounded.

    Codes are those of x · norm. The reciprocal of the root mean square multiplies only the scales, because its last
    digit depends on the order of a sum.

    x [T, K], norm [K], codes [T, K]; the scale of token t and group g is at g · stride + t. BLOCK columns, the smallest
    power of two from K on, are divided into GROUPs; GROUP = BLOCK means that a row is one group. With TOTAL > 0 the
    sum of each TOTAL codes is stored in `totals`, in the same order as the scales; TOTAL is GROUP, or a row is one
    group.
    """
    launch_dependents(PDL)
    column = tl.arange(0, BLOCK)
    inside = column < K
    if NORM:
        # No earlier kernel writes a weight, so it is loaded while the kernel before still runs.
        weight = tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    if GATED:
        gate = tl.load(x + token * 2 * K + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x + token * 2 * K + K + column, mask=inside, other=0.0).to(tl.float32)
        values = gated(gate, up, GELU).to(x.dtype.element_ty).to(tl.float32)
    else:
        values = tl.load(x + token * K + column, mask=inside, other=0.0).to(tl.float32)
    root = 1.0
    if NORM:
        root = tl.rsqrt(tl.sum(values * values, axis=0) / K + eps)
        values *= weight
    largest: tl.constexpr = LARGEST_FP8 if FP8 else LARGEST_INT8
    # A row that is one group is divided like its totals, so that a warp has the numbers of its sums.
    PART: tl.constexpr = TOTAL if TOTAL else GROUP
    PARTS: tl.constexpr = BLOCK // PART
    grouped = tl.reshape(values, (PARTS, PART))
    # The maximum of the bits, because a maximum of numbers ignores NaN. The scale of a NaN becomes NaN, whatever its
    # code is.
    bits = tl.max(tl.abs(grouped).to(tl.int32, bitcast=True), axis=1)
    if GROUP != PART:
        bits = tl.zeros_like(bits) + tl.max(bits, axis=0)
    most = bits.to(tl.float32, bitcast=True)
    scaled = grouped * _to_codes(most, largest)[:, None]
    rounded = as_codes(scaled, largest, codes.dtype.element_ty)
    tl.store(codes + token * K + column, tl.reshape(rounded, (BLOCK,)), mask=inside)
    parts = tl.arange(0, PARTS)
    group_scales = tl.div_rn(most, tl.zeros_like(most) + largest) * root
    if GROUP == PART:
        tl.store(scales + parts * stride + token, group_scales, mask=parts * PART < K)
    else:
        tl.store(scales + parts * stride + token, group_scales, mask=parts == 0)
    if TOTAL:
        total = tl.sum(rounded.to(tl.float32), axis=1)
        tl.store(totals + parts * stride + token, total, mask=parts * PART < K)


@triton.jit
def load_columns(pointers, inside, EVEN: tl.constexpr, POLICY: tl.constexpr):
    """Load codes [rows, columns], with 0 for columns where the mask `inside` is False."""
    if EVEN:
        return tl.load(pointers, eviction_policy=POLICY)
    return tl.load(pointers, mask=inside[None, :], other=0.0, eviction_policy=POLICY)


@triton.jit
def add_products(held, taken, sums, scale, token_scale, GROUPED: tl.constexpr, SUM: tl.constexpr):
    """Return `sums` plus the products of codes; if GROUPED, the products are scaled first, with the group's scales."""
    if GROUPED:
        nothing = tl.zeros((held.shape[0], taken.shape[1]), SUM)
        products = tl.dot(held, taken, nothing, out_dtype=SUM).to(tl.float32)
        sums += products * (scale[:, None] * token_scale[None, :])
    else:
        sums = tl.dot(held, taken, sums, out_dtype=SUM)
    return sums


@triton.jit(do_not_specialize=["T"])
def scaled_kernel(
    x,
    x_scales,
    codes,
    scales,
    bias,
    out,
    partials,
    counters,
    T,
    N,
    token_stride,
    row_stride,
    group_stride,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    OP: tl.constexpr,
    GELU: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply codes of some tokens by codes of a weight; grid (ceil(T / TOKENS), ceil(N / ROWS), SPLITS).

    out [T, N]; x [T, K] with memory for whole tiles of tokens; codes [N or, with GATE_UP, 2·N, K] of the same dtype.
    The scale of token t and group g is at g · token_stride + t, also with memory for whole tiles; that of row r and
    group g is at r · row_stride + g · group_stride. COLUMNS columns are read at a time, all of one group. partials and
    counters are as in `skinny_kernel`.
    """
    EVEN: tl.constexpr = K % (COLUMNS * SPLITS) == 0
    STEPS: tl.constexpr = (K + COLUMNS * SPLITS - 1) // (COLUMNS * SPLITS)
    GROUPED: tl.constexpr = GROUP < K
    kind: tl.constexpr = codes.dtype.element_ty
    SUM: tl.constexpr = tl.int32 if kind == tl.int8 else tl.float32
    launch_dependents(PDL)
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(2)
    held_rows = tl.minimum(rows, N - 1).to(tl.int64)
    rows_at, up_rows_at = codes + held_rows[:, None] * K, codes + (held_rows + N)[:, None] * K
    scales_at, up_scales_at = scales + held_rows * row_stride, scales + (held_rows + N) * row_stride
    x_at = x + tokens.to(tl.int64)[:, None] * K
    columns = tl.arange(0, COLUMNS)
    if EARLY:
        call_into_l2(codes + held_rows * K, split * (STEPS * COLUMNS), K, EARLY)
        if OP == GATE_UP:
            call_into_l2(codes + (held_rows + N) * K, split * (STEPS * COLUMNS), K, EARLY)
    wait_for_inputs(PDL)
    sums = tl.zeros((ROWS, TOKENS), tl.float32 if GROUPED else SUM)
    sums_up = tl.zeros((ROWS, TOKENS), tl.float32 if GROUPED else SUM)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        at = (split * STEPS + step) * COLUMNS + columns
        inside = at < K
        held = load_columns(rows_at + at[None, :], inside, EVEN, "evict_first")
        scale, scale_up, token_scale = 0.0, 0.0, 0.0
        if GROUPED:
            group = tl.minimum((split * STEPS + step) * COLUMNS // GROUP, K // GROUP - 1)
            scale = tl.load(scales_at + group * group_stride)
            token_scale = tl.load(x_scales + group * token_stride + tokens)
        taken = tl.trans(load_columns(x_at + at[None, :], inside, EVEN, "evict_last"))
        sums = add_products(held, taken, sums, scale, token_scale, GROUPED, SUM)
        if OP == GATE_UP:
            held_up = load_columns(up_rows_at + at[None, :], inside, EVEN, "evict_first")
            if GROUPED:
                scale_up = tl.load(up_scales_at + group * group_stride)
            sums_up = add_products(held_up, taken, sums_up, scale_up, token_scale, GROUPED, SUM)
    total = sums.to(tl.float32)
    total_up = sums_up.to(tl.float32)
    if not GROUPED:
        token_scale = tl.load(x_scales + tokens)[None, :]
        total *= tl.load(scales_at)[:, None] * token_scale
        if OP == GATE_UP:
            total_up *= tl.load(up_scales_at)[:, None] * token_scale
    no_squares = tl.zeros((TOKENS,), tl.float32)
    finish_split(
        total, total_up, no_squares, bias, out, partials, counters, rows, tokens, split, T, N, 0.0,
        K, OP, GELU, NO_NORM, BIAS, ROWS, TOKENS, SPLITS,
    )  # fmt: skip


@triton.jit
def scaled_gemv_kernel(
    x,
    x_scales,
    codes,
    scales,
    bias,
    out,
    N,
    row_stride,
    K: tl.constexpr,
    OP: tl.constexpr,
    GELU: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    VECTOR: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply codes of one token by codes of a weight, without tensor cores and splits; grid (ceil(N / ROWS),).

    The arguments are those of `scaled_kernel` with one scale per row; COLUMNS columns are read at a time, VECTOR of
    them by one thread.
    """
    EVEN: tl.constexpr = K % COLUMNS == 0
    launch_dependents(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < N
    held_rows = tl.minimum(rows, N - 1).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    first = codes + held_rows[:, None] * K + columns[None, :]
    second = codes + (held_rows + N)[:, None] * K + columns[None, :]
    held = load_columns(first, columns < K, EVEN, "evict_first")
    scale = tl.load(scales + held_rows * row_stride)
    held_up, scale_up = held, scale
    if OP == GATE_UP:
        held_up = load_columns(second, columns < K, EVEN, "evict_first")
        scale_up = tl.load(scales + (held_rows + N) * row_stride)
    wait_for_inputs(PDL)
    sums = tl.zeros((ROWS, COLUMNS // VECTOR), tl.float32)
    sums_up = tl.zeros((ROWS, COLUMNS // VECTOR), tl.float32)
    for start in tl.range(0, K, COLUMNS):
        # The codes of the next round are loaded before this round's are multiplied, so that loads are always in flight.
        # Whole rounds are loaded without a mask, for which the last one is loaded twice.
        coming, coming_up = held, held_up
        if K > COLUMNS:
            later = start + COLUMNS
            if EVEN:
                later = tl.minimum(later, K - COLUMNS)
            coming = load_columns(first + later, later + columns < K, EVEN, "evict_first")
            if OP == GATE_UP:
                coming_up = load_columns(second + later, later + columns < K, EVEN, "evict_first")
        at = start + columns
        taken = load_columns(x + at[None, :], at < K, EVEN, "evict_last").to(tl.float32)
        sums += fold(held.to(tl.float32) * taken, VECTOR)
        if OP == GATE_UP:
            sums_up += fold(held_up.to(tl.float32) * taken, VECTOR)
        held, held_up = coming, coming_up
    token_scale = tl.load(x_scales)
    total = tl.sum(sums, axis=1) * (scale * token_scale)
    if BIAS:
        total += tl.load(bias + rows, mask=inside, other=0.0).to(tl.float32)
    if OP == GATE_UP:
        total_up = tl.sum(sums_up, axis=1) * (scale_up * token_scale)
        if BIAS:
            total_up += tl.load(bias + N + rows, mask=inside, other=0.0).to(tl.float32)
        total = gated(total, total_up, GELU)
    if OP == ADD:
        total += tl.load(out + rows, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + rows, total.to(out.dtype.element_ty), mask=inside)
