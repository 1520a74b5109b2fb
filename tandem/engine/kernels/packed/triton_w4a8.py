"""The kernel of `w4a8_products`: products of 4-bit codes with 8-bit codes."""

import triton
import triton.language as tl

from tandem.engine.kernels.linear.triton_linear_kernels import GATE_UP, NO_NORM, call_into_l2, finish_split
from tandem.engine.kernels.packed.triton_codes import CENTRE, WIDE
from tandem.engine.kernels.triton_launch import launch_dependents, wait_for_inputs

FP8_UNIT = tl.constexpr(2.0**9)
"""Read as float8_e4m3fn, a byte n ≤ 16 is the number n / FP8_UNIT: the subnormals and the first normal numbers."""
_LOWER = tl.constexpr("and.b32 $0, $1, 0x0F0F0F0F;")
_UPPER = tl.constexpr("{ .reg .b32 t; shr.u32 t, $1, 4; and.b32 $0, t, 0x0F0F0F0F; }")
_GROUPS = tl.constexpr(16)
"""Number of groups whose offsets are multiplied at a time: the least number of columns of a product."""


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
def _parts(numbers):
    """Split float32 numbers into two parts that tensor cores multiply as they are: 11 bits each (TF32)."""
    first = (numbers.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    return first, numbers - first


@triton.jit
def _add_offsets(
    sums, offsets_at, totals, tokens, split, group_stride, token_stride,
    GROUPS: tl.constexpr, OFFSETS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Add offset · total of each group, for the groups that fall to this split."""
    for first in tl.range(split * _GROUPS, GROUPS, SPLITS * _GROUPS, num_stages=1):
        group = first + tl.arange(0, _GROUPS)
        inside = group < GROUPS
        offset = tl.load(offsets_at[:, None] + group[None, :] * group_stride, mask=inside[None, :], other=0.0)
        if not OFFSETS:
            offset *= -CENTRE
        total = tl.load(totals + group[:, None] * token_stride + tokens[None, :], mask=inside[:, None], other=0.0)
        offset, offset_rest = _parts(offset)
        total, total_rest = _parts(total)
        sums = tl.dot(offset_rest, total, sums, input_precision="tf32")
        sums = tl.dot(offset, total_rest, sums, input_precision="tf32")
        sums = tl.dot(offset, total, sums, input_precision="tf32")
    return sums


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
    GROUP: tl.constexpr,
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
    tiles of tokens, as x_scales and `totals` [K / GROUP, T] have; codes [N or, with GATE_UP, 2·N, K / 2] uint8 with two
    codes per byte. The scale and offset of row r and group g are at r · row_stride + g · group_stride; without OFFSETS
    the scales are read in their place. TILE columns, whose codes are packed together, are read at a time; GROUP is a
    multiple of TILE. partials and counters are as in `skinny_kernel`.

    With code = u, the product of token t and row r is Σ over groups of scale · Σ u · x + offset · total.
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
    begin = split * STEPS
    if EARLY:
        call_into_l2(rows_at, begin * HALF, BYTES, EARLY)
        if OP == GATE_UP:
            call_into_l2(up_rows_at, begin * HALF, BYTES, EARLY)
    wait_for_inputs(PDL)
    x_at = x + tokens.to(tl.int64)[:, None] * K
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
        group = tl.minimum(step * TILE // GROUP, K // GROUP - 1)
        token_scale = 0.0
        if GROUPED:
            token_scale = tl.load(x_scales + group * token_stride + tokens)
        scale = tl.load(scales + held_rows * row_stride + group * group_stride)
        sums = _add_group(sums, held, right, scale, token_scale, GROUPED)
        if OP == GATE_UP:
            held_up = _load_bytes(up_rows_at, step * HALF, HALF, BYTES, EVEN)
            scale_up = tl.load(scales + up_rows * row_stride + group * group_stride)
            sums_up = _add_group(sums_up, held_up, right, scale_up, token_scale, GROUPED)
    factor = FP8_UNIT
    if not GROUPED:
        factor *= tl.load(x_scales + tokens)[None, :]
    sums = _add_offsets(
        sums * factor, offsets + held_rows * row_stride, totals, tokens, split, group_stride, token_stride,
        K // GROUP, OFFSETS, SPLITS,
    )  # fmt: skip
    if OP == GATE_UP:
        sums_up = _add_offsets(
            sums_up * factor, offsets + up_rows * row_stride, totals, tokens, split, group_stride, token_stride,
            K // GROUP, OFFSETS, SPLITS,
        )  # fmt: skip
    no_squares = tl.zeros((TOKENS,), tl.float32)
    finish_split(
        sums, sums_up, no_squares, bias, out, partials, counters, rows, tokens, split, T, N, 0.0,
        K, OP, GELU, NO_NORM, BIAS, ROWS, TOKENS, SPLITS,
    )  # fmt: skip
