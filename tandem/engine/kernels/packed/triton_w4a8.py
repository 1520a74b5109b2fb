"""The kernel of `w4a8_products`: products of 4-bit codes with 8-bit codes."""

import triton
import triton.language as tl

from tandem.engine.kernels.linear.triton_linear_kernels import GATE_UP, NO_NORM, call_into_l2, finish_split
from tandem.engine.kernels.packed.triton_codes import CENTRE, WIDE
from tandem.engine.kernels.triton_launch import launch_dependents, wait_for_inputs

_GROUPS = tl.constexpr(16)
"""Number of groups whose offsets are multiplied at a time."""
FP8_UNIT = tl.constexpr(2.0**9)
"""Read as float8_e4m3fn, a byte n ≤ 16 is the number n / FP8_UNIT: the subnormals and the first normal numbers."""
_LOWER = tl.constexpr("and.b32 $0, $1, 0x0F0F0F0F;")
_UPPER = tl.constexpr("{ .reg .b32 t; shr.u32 t, $1, 4; and.b32 $0, t, 0x0F0F0F0F; }")


@triton.jit
def _unpacked(held):
    """Return the codes of a tile of columns, bytes [rows, columns / 2] uint8, in order → [rows, columns] float8e4nv.

    They are the codes 0 to 15, less by the factor FP8_UNIT. A thread unpacks four bytes at a time, which are four
    adjacent columns of each half of the tile, as a register of the tensor cores holds them.
    """
    ROWS: tl.constexpr = held.shape[0]
    if WIDE:
        lower, upper = (held & 15).to(tl.int8, bitcast=True), (held >> 4).to(tl.int8, bitcast=True)
    else:
        lower = tl.inline_asm_elementwise(_LOWER, "=r,r", [held], dtype=tl.int8, is_pure=True, pack=4)
        upper = tl.inline_asm_elementwise(_UPPER, "=r,r", [held], dtype=tl.int8, is_pure=True, pack=4)
    codes = tl.reshape(tl.permute(tl.join(lower, upper), (0, 2, 1)), (ROWS, 2 * held.shape[1]))
    return codes.to(tl.float8e4nv, bitcast=True)


@triton.jit
def _load_bytes(rows_at, start, COUNT: tl.constexpr, BYTES: tl.constexpr, EVEN: tl.constexpr):
    """Load COUNT of the BYTES bytes of each row, from byte `start` on → [rows, COUNT]; 0 after the end of a row."""
    at = start + tl.arange(0, COUNT)
    if EVEN:
        return tl.load(rows_at[:, None] + at[None, :], eviction_policy="evict_first")
    return tl.load(rows_at[:, None] + at[None, :], mask=(at < BYTES)[None, :], other=0, eviction_policy="evict_first")


@triton.jit
def _add_group(sums, held, right, scale, token_scale, GROUPED: tl.constexpr):
    """Return `sums` plus the products of a tile of columns, scaled by row and, if GROUPED, by token."""
    products = tl.dot(_unpacked(held), right, out_dtype=tl.float32)
    if GROUPED:
        return sums + products * (scale[:, None] * token_scale[None, :])
    return sums + products * scale[:, None]


@triton.jit
def _load_offsets(offsets_at, first, group_stride, GROUPS: tl.constexpr, OFFSETS: tl.constexpr):
    """Load the offsets of _GROUPS groups from group `first` on → [rows, _GROUPS], 0 after the last of GROUPS groups."""
    group = first + tl.arange(0, _GROUPS)
    offset = tl.load(offsets_at[:, None] + group[None, :] * group_stride, mask=(group < GROUPS)[None, :], other=0.0)
    if not OFFSETS:
        offset *= -CENTRE
    return offset


@triton.jit
def _load_totals(totals_at, scales_at, first, token_stride, GROUPS: tl.constexpr, GROUPED: tl.constexpr):
    """Load the totals of _GROUPS groups from group `first` on → [_GROUPS, tokens], scaled if GROUPED."""
    group = first + tl.arange(0, _GROUPS)
    inside = (group < GROUPS)[:, None]
    total = tl.load(totals_at[None, :] + group[:, None] * token_stride, mask=inside, other=0.0)
    if GROUPED:
        total *= tl.load(scales_at[None, :] + group[:, None] * token_stride, mask=inside, other=0.0)
    return total


@triton.jit
def _add_offsets(sums, offset, total):
    """Return sums + offset · total in float32.

    Tensor cores multiply the first 11 bits of a number (TF32), so each operand is split into two numbers.
    """
    first_offset = (offset.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    first_total = (total.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    sums = tl.dot(offset - first_offset, first_total, sums, input_precision="tf32")
    sums = tl.dot(first_offset, total - first_total, sums, input_precision="tf32")
    return tl.dot(first_offset, first_total, sums, input_precision="tf32")


@triton.jit(do_not_specialize=["T"])
def w4a8_kernel(
    x,
    x_scales,
    totals,
    codes,
    scales,
    offsets,
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
    GROUPED: tl.constexpr,
    OFFSETS: tl.constexpr,
    OP: tl.constexpr,
    GELU: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply 8-bit codes of some tokens by 4-bit codes; grid (ceil(T / TOKENS), ceil(N / ROWS), SPLITS).

    out [T, N]; x [T, K] float8e4nv with a scale per token or, if GROUPED, per token and group, with memory for whole
    tiles of tokens, as x_scales and `totals` [K / TILE, T] have; codes [N or, with GATE_UP, 2·N, K / 2] uint8 with two
    codes per byte. The scale and offset of row r and group g are at r · row_stride + g · group_stride; without OFFSETS
    the scales are read in their place. TILE columns, whose codes are packed together, are a group. partials and
    counters are as in `skinny_kernel`.

    The product of token t and row r is the sum over groups of scale · Σ code · x + offset · total.
    """
    BYTES: tl.constexpr = K // 2
    HALF: tl.constexpr = TILE // 2
    STEPS: tl.constexpr = (K + TILE * SPLITS - 1) // (TILE * SPLITS)
    EVEN: tl.constexpr = K % (TILE * SPLITS) == 0
    launch_dependents(PDL)
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(2)
    held_rows = tl.minimum(rows, N - 1).to(tl.int64)
    up_rows = held_rows + N
    rows_at, up_rows_at = codes + held_rows * BYTES, codes + up_rows * BYTES
    scales_at, up_scales_at = scales + held_rows * row_stride, scales + up_rows * row_stride
    offsets_at, up_offsets_at = offsets + held_rows * row_stride, offsets + up_rows * row_stride
    begin = split * STEPS
    if EARLY:
        call_into_l2(rows_at, begin * HALF, BYTES, EARLY)
        if OP == GATE_UP:
            call_into_l2(up_rows_at, begin * HALF, BYTES, EARLY)
    offset = _load_offsets(offsets_at, split * _GROUPS, group_stride, K // TILE, OFFSETS)
    offset_up = offset
    if OP == GATE_UP:
        offset_up = _load_offsets(up_offsets_at, split * _GROUPS, group_stride, K // TILE, OFFSETS)
    wait_for_inputs(PDL)
    x_at = x + tokens.to(tl.int64)[:, None] * K
    # Offsets are divided among the splits, and the first of them are loaded here, not where the program would wait.
    total = _load_totals(totals + tokens, x_scales + tokens, split * _GROUPS, token_stride, K // TILE, GROUPED)
    sums = tl.zeros((ROWS, TOKENS), tl.float32)
    sums_up = tl.zeros((ROWS, TOKENS), tl.float32)
    for step in tl.range(begin, begin + STEPS, num_stages=STAGES):
        held = _load_bytes(rows_at, step * HALF, HALF, BYTES, EVEN)
        at = step * TILE + tl.arange(0, TILE)
        if EVEN:
            taken = tl.load(x_at + at[None, :], eviction_policy="evict_last")
        else:
            taken = tl.load(x_at + at[None, :], mask=(at < K)[None, :], other=0.0, eviction_policy="evict_last")
        right = tl.trans(taken)
        group = tl.minimum(step, K // TILE - 1)
        token_scale = 0.0
        if GROUPED:
            token_scale = tl.load(x_scales + group * token_stride + tokens)
        sums = _add_group(sums, held, right, tl.load(scales_at + group * group_stride), token_scale, GROUPED)
        if OP == GATE_UP:
            held_up = _load_bytes(up_rows_at, step * HALF, HALF, BYTES, EVEN)
            scale_up = tl.load(up_scales_at + group * group_stride)
            sums_up = _add_group(sums_up, held_up, right, scale_up, token_scale, GROUPED)
    sums = _add_offsets(sums * FP8_UNIT, offset, total)
    if OP == GATE_UP:
        sums_up = _add_offsets(sums_up * FP8_UNIT, offset_up, total)
    for first in tl.range((split + SPLITS) * _GROUPS, K // TILE, SPLITS * _GROUPS, num_stages=1):
        total = _load_totals(totals + tokens, x_scales + tokens, first, token_stride, K // TILE, GROUPED)
        sums = _add_offsets(sums, _load_offsets(offsets_at, first, group_stride, K // TILE, OFFSETS), total)
        if OP == GATE_UP:
            offset_up = _load_offsets(up_offsets_at, first, group_stride, K // TILE, OFFSETS)
            sums_up = _add_offsets(sums_up, offset_up, total)
    if not GROUPED:
        factor = tl.load(x_scales + tokens)[None, :]
        sums *= factor
        sums_up *= factor
    no_squares = tl.zeros((TOKENS,), tl.float32)
    finish_split(
        sums, sums_up, no_squares, bias, out, partials, counters, rows, tokens, split, T, N, 0.0,
        K, OP, GELU, NO_NORM, BIAS, ROWS, TOKENS, SPLITS,
    )  # fmt: skip
