"""The kernels of `packed_products`: a product of some tokens with the codes of a weight, and the weight itself."""

import triton
import triton.language as tl

from engine.kernels.linear.triton_linear_kernels import GATE_UP, call_into_l2, finish_split, fold
from engine.kernels.triton_launch import INTERPRETED, launch_dependents, wait_for_inputs

TILE = tl.constexpr(128)
CENTRE = tl.constexpr(8)
"""`packed_weight.TILE` and `packed_weight.CENTRE`."""
_WIDE = tl.constexpr(INTERPRETED)
"""True if bfloat16 is subtracted in float32: the interpreter would subtract its bits."""


@triton.jit
def _minus(a, b):
    """Subtracts bfloat16 whose difference is exact."""
    if _WIDE:
        return (a.to(tl.float32) - b.to(tl.float32)).to(tl.bfloat16)
    return a - b


@triton.jit
def bytes_as(held, FP8: tl.constexpr, dtype: tl.constexpr):
    """Converts 8-bit codes, uint8 with the bits of int8 or, with FP8, of float8_e4m3fn.

    Int8 to bfloat16 by bits, where 0x4300 | n is 128 + n for n < 128, and 0x4380 is 256.
    """
    if FP8:
        return held.to(tl.float8e4nv, bitcast=True).to(dtype)
    if dtype == tl.bfloat16:
        wide = held.to(tl.uint16)
        rest = ((wide & 0x7F) | 0x4300).to(tl.bfloat16, bitcast=True)
        sign = ((wide & 0x80) | 0x4300).to(tl.bfloat16, bitcast=True)
        return _minus(rest, sign)
    return held.to(tl.int8, bitcast=True).to(dtype)


@triton.jit
def nibbles_as(codes, centre: tl.constexpr, dtype: tl.constexpr):
    """Converts 4-bit codes minus `centre`; to bfloat16 by bits, where 0x4300 | n is 128 + n."""
    if dtype == tl.bfloat16:
        shifted = (codes.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True)
        return _minus(shifted, tl.full((1, 1), 0x4300 | centre, tl.uint16).to(tl.bfloat16, bitcast=True))
    return (codes.to(tl.int32) - centre).to(dtype)


@triton.jit
def numbers(held, part, BITS: tl.constexpr, FP8: tl.constexpr, centre: tl.constexpr, dtype: tl.constexpr):
    """Converts bytes of codes: 8-bit ones, or the lower (`part` 0) or upper halves minus `centre`."""
    if BITS == 4:
        return nibbles_as((held >> (4 * part)) & 15, centre, dtype)
    return bytes_as(held, FP8, dtype)


@triton.jit
def _codes_at(rows_at, at, inside, EVEN: tl.constexpr):
    """Loads some columns of codes; without a mask, which would make the loads narrow, where all are `inside`."""
    if EVEN:
        return tl.load(rows_at + at[None, :], eviction_policy="evict_first")
    return tl.load(rows_at + at[None, :], mask=inside[None, :], other=0, eviction_policy="evict_first")


@triton.jit
def first_column(start, part, K: tl.constexpr, BITS: tl.constexpr):
    """Returns the first column of the codes from byte `start` of a row on: the lower (`part` 0) or upper halves."""
    first = start
    if BITS == 4:
        tile = start // (TILE // 2)
        first = start + tile * (TILE // 2) + part * (tl.minimum(TILE, K - tile * TILE) // 2)
    return first


@triton.jit
def _norm_at(norm, start, part, within, K: tl.constexpr, BITS: tl.constexpr):
    """Loads the norm's weight for the columns of some bytes, 0 beyond a row."""
    columns = first_column(start, part, K, BITS) + within
    return tl.load(norm + columns, mask=start + within < K * BITS // 8, other=0.0)


@triton.jit
def _input(x_at, scale, columns, inside, present, folded, EVEN: tl.constexpr, NORM: tl.constexpr, VECTOR: tl.constexpr):
    """Loads some columns of the tokens, times the norm's weight → [tokens, columns], and their squares summed."""
    if EVEN:
        loaded = tl.load(x_at + columns[None, :], mask=present, other=0.0)
    else:
        loaded = tl.load(x_at + columns[None, :], mask=present & inside[None, :], other=0.0)
    if NORM:
        wide = loaded.to(tl.float32)
        folded += fold(wide * wide, VECTOR)
        loaded = (wide * scale.to(tl.float32)[None, :]).to(loaded.dtype)
    return loaded, folded


@triton.jit
def add_products(
    sums,
    weights,
    right,
    total,
    scales_at,
    offsets_at,
    group,
    group_stride,
    GROUPED: tl.constexpr,
    OFFSETS: tl.constexpr,
):
    """Adds the products of columns that share a scale; `total` [tokens] sums the input over them."""
    if not GROUPED:
        return tl.dot(weights, right, sums, input_precision="ieee")
    scale = tl.load(scales_at + group * group_stride).to(tl.float32)
    sums += tl.dot(weights, right, input_precision="ieee") * scale[:, None]
    if OFFSETS:
        sums += tl.load(offsets_at + group * group_stride).to(tl.float32)[:, None] * total[None, :]
    return sums


@triton.jit(do_not_specialize=["T"])
def packed_kernel(
    x,
    norm,
    codes,
    scales,
    offsets,
    bias,
    out,
    partials,
    counters,
    T,
    N,
    eps,
    row_stride,
    group_stride,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    FP8: tl.constexpr,
    OFFSETS: tl.constexpr,
    OP: tl.constexpr,
    GELU: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    VECTOR: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiplies some tokens; grid (ceil(N / ROWS), ceil(T / TOKENS), SPLITS).

    out [T, N]; x [T, K]; codes [N or, with GATE_UP, 2·N, K / 8 · BITS] uint8; scales and offsets: of row r and group g
    at r · row_stride + g · group_stride; COLUMNS bytes of codes at a time, which never cross a group. partials and
    counters as of `skinny_kernel`.
    """
    BYTES: tl.constexpr = K * BITS // 8
    STEPS: tl.constexpr = (BYTES + COLUMNS * SPLITS - 1) // (COLUMNS * SPLITS)
    EVEN: tl.constexpr = BYTES % (COLUMNS * SPLITS) == 0
    GROUPED: tl.constexpr = GROUP < K
    GROUPS: tl.constexpr = K // GROUP
    MIDDLE: tl.constexpr = 0 if OFFSETS else CENTRE
    dtype: tl.constexpr = x.dtype.element_ty
    launch_dependents(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tokens = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    split = tl.program_id(2)
    held_rows = tl.minimum(rows, N - 1).to(tl.int64)
    up_rows = held_rows + N
    rows_at, up_rows_at = codes + held_rows[:, None] * BYTES, codes + up_rows[:, None] * BYTES
    scales_at, up_scales_at = scales + held_rows * row_stride, scales + up_rows * row_stride
    offsets_at, up_offsets_at = offsets + held_rows * row_stride, offsets + up_rows * row_stride
    if EARLY:
        call_into_l2(codes + held_rows * BYTES, split * (STEPS * COLUMNS), BYTES, EARLY)
        if OP == GATE_UP:
            call_into_l2(codes + up_rows * BYTES, split * (STEPS * COLUMNS), BYTES, EARLY)
    wait_for_inputs(PDL)
    present = (tokens < T)[:, None]
    x_at = x + tokens.to(tl.int64)[:, None] * K
    sums = tl.zeros((ROWS, TOKENS), tl.float32)
    sums_up = tl.zeros((ROWS, TOKENS), tl.float32)
    folded = tl.zeros((TOKENS, COLUMNS // VECTOR), tl.float32)
    totals = tl.zeros((TOKENS,), tl.float32)
    within = tl.arange(0, COLUMNS)
    low, high = x, x
    if NORM:
        low = _norm_at(norm, split * STEPS * COLUMNS, 0, within, K, BITS)
        if BITS == 4:
            high = _norm_at(norm, split * STEPS * COLUMNS, 1, within, K, BITS)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        start = (split * STEPS + step) * COLUMNS
        inside = start + within < BYTES
        norm_low, norm_high = low, high
        if NORM:
            # These loads are too narrow for the compiler's pipeline, so they are issued one step ahead here.
            low = _norm_at(norm, start + COLUMNS, 0, within, K, BITS)
            if BITS == 4:
                high = _norm_at(norm, start + COLUMNS, 1, within, K, BITS)
        held = _codes_at(rows_at, start + within, inside, EVEN)
        if OP == GATE_UP:
            held_up = _codes_at(up_rows_at, start + within, inside, EVEN)
        for part in tl.static_range(8 // BITS):
            # Known to be a multiple, so that loads are wide.
            at = tl.multiple_of(first_column(start, part, K, BITS), COLUMNS)
            scale = norm_high if part else norm_low
            loaded, folded = _input(x_at, scale, at + within, inside, present, folded, EVEN, NORM, VECTOR)
            total = totals
            if OFFSETS:
                total = tl.sum(loaded.to(tl.float32), axis=1)
                totals += total
            right = tl.trans(loaded)
            group = tl.minimum(at // GROUP, GROUPS - 1)
            weights = numbers(held, part, BITS, FP8, MIDDLE, dtype)
            sums = add_products(
                sums, weights, right, total, scales_at, offsets_at, group, group_stride, GROUPED, OFFSETS
            )
            if OP == GATE_UP:
                weights = numbers(held_up, part, BITS, FP8, MIDDLE, dtype)
                sums_up = add_products(
                    sums_up, weights, right, total, up_scales_at, up_offsets_at, group, group_stride, GROUPED, OFFSETS
                )
    if not GROUPED:
        sums *= tl.load(scales_at).to(tl.float32)[:, None]
        if OFFSETS:
            sums += tl.load(offsets_at).to(tl.float32)[:, None] * totals[None, :]
        if OP == GATE_UP:
            sums_up *= tl.load(up_scales_at).to(tl.float32)[:, None]
            if OFFSETS:
                sums_up += tl.load(up_offsets_at).to(tl.float32)[:, None] * totals[None, :]
    squares = tl.sum(folded, axis=1)
    finish_split(
        sums, sums_up, squares, bias, out, partials, counters, rows, tokens, split, T, N, eps,
        K, OP, GELU, NORM, BIAS, ROWS, TOKENS, SPLITS,
    )  # fmt: skip


@triton.jit
def dequantize_kernel(
    codes,
    scales,
    offsets,
    out,
    row_stride,
    group_stride,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    FP8: tl.constexpr,
    OFFSETS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Computes a row of the weight [N, K] for a program, in float32 and rounded once; COLUMNS bytes at a time."""
    BYTES: tl.constexpr = K * BITS // 8
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < BYTES
    held = tl.load(codes + row * BYTES + at, mask=inside, other=0)
    tile = at // (TILE // 2)
    half = tl.minimum(TILE, K - tile * TILE) // 2
    for part in tl.static_range(8 // BITS):
        column = at
        if BITS == 8:
            code = bytes_as(held, FP8, tl.float32)
        else:
            column = tile * TILE + at % (TILE // 2) + part * half
            code = ((held >> (4 * part)) & 15).to(tl.float32) - (0 if OFFSETS else CENTRE)
        place = row * row_stride + column // GROUP * group_stride
        weight = code * tl.load(scales + place, mask=inside, other=0.0).to(tl.float32)
        if OFFSETS:
            weight += tl.load(offsets + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + row * K + column, weight.to(out.dtype.element_ty), mask=inside)
