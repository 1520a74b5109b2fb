"""The kernel of `w4a8_products`: products of 4-bit codes with 8-bit codes."""

import triton
import triton.language as tl

from tandem.engine.kernels.linear.triton_linear_kernels import GATE_UP, NO_NORM, call_into_l2, finish_split
from tandem.engine.kernels.packed.triton_codes import CENTRE, WIDE
from tandem.engine.kernels.triton_launch import launch_dependents, wait_for_inputs

FP8_UNIT = tl.constexpr(2.0**9)
"""Read as float8_e4m3fn, a byte n ≤ 16 is the number n / FP8_UNIT: the subnormals and the first normal numbers."""
CENTRED_UNIT = tl.constexpr(2.0**4)
"""int8 codes without offsets are multiplied in the upper halves of bytes, where a shift extends their sign."""
_LOWER = tl.constexpr("and.b32 $0, $1, 0x0F0F0F0F;")
_UPPER = tl.constexpr("{ .reg .b32 t; shr.u32 t, $1, 4; and.b32 $0, t, 0x0F0F0F0F; }")
_LOWER_CENTRED = tl.constexpr("{ .reg .b32 t; shl.b32 t, $1, 4; lop3.b32 $0, t, 0xF0F0F0F0, 0x80808080, 0x6A; }")
_UPPER_CENTRED = tl.constexpr("lop3.b32 $0, $1, 0xF0F0F0F0, 0x80808080, 0x6A;")
_GROUPS = tl.constexpr(16)
"""Number of groups whose offsets are multiplied at a time: the least number of columns of a product."""


@triton.jit
def _unpacked(held, CENTRED: tl.constexpr, kind: tl.constexpr):
    """Return the codes of a tile of columns, bytes [rows, columns / 2] uint8, in order → [rows, columns].

    If CENTRED they are CENTRED_UNIT · (code - CENTRE), int8. Else they are the codes 0 to 15, int8, or float8_e4m3fn
    and then less by the factor FP8_UNIT. A thread unpacks four bytes at a time, which are four adjacent columns of each
    half of the tile, as a register of the tensor cores holds them.
    """
    ROWS: tl.constexpr = held.shape[0]
    if CENTRED:
        lower = _bytewise(((held << 4) & 0xF0) ^ 0x80 if WIDE else held, _LOWER_CENTRED)
        upper = _bytewise((held & 0xF0) ^ 0x80 if WIDE else held, _UPPER_CENTRED)
    else:
        lower = _bytewise(held & 15 if WIDE else held, _LOWER)
        upper = _bytewise(held >> 4 if WIDE else held, _UPPER)
    codes = tl.reshape(tl.permute(tl.join(lower, upper), (0, 2, 1)), (ROWS, 2 * held.shape[1]))
    return codes.to(kind, bitcast=True)


@triton.jit
def _bytewise(held, PTX: tl.constexpr):
    """Apply PTX to four bytes at a time; the interpreter gets the result as `held`."""
    if WIDE:
        return held.to(tl.int8, bitcast=True)
    return tl.inline_asm_elementwise(PTX, "=r,r", [held], dtype=tl.int8, is_pure=True, pack=4)


@triton.jit
def _load_bytes(rows_at, start, COUNT: tl.constexpr, BYTES: tl.constexpr, EVEN: tl.constexpr):
    """Load COUNT of the BYTES bytes of each row, from byte `start` on → [rows, COUNT]; 0 after the end of a row."""
    at = start + tl.arange(0, COUNT)
    if EVEN:
        return tl.load(rows_at[:, None] + at[None, :], eviction_policy="evict_first")
    return tl.load(rows_at[:, None] + at[None, :], mask=(at < BYTES)[None, :], other=0, eviction_policy="evict_first")


@triton.jit
def _add_group(
    sums, held, right, scale, token_scale, CENTRED: tl.constexpr, SCALED: tl.constexpr, SUM: tl.constexpr
):  # fmt: skip
    """Return `sums` plus the products of a tile of columns, scaled by row and, if SCALED, by token."""
    products = tl.dot(_unpacked(held, CENTRED, right.dtype), right, out_dtype=SUM).to(tl.float32)
    if SCALED:
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

    out [T, N]; x [T, K] int8 with a scale per token and group, or float8_e4m3fn with a scale per token, with memory for
    whole tiles of tokens, as x_scales and `totals` [K / GROUP, T] have; codes [N or, with GATE_UP, 2·N, K / 2] uint8
    with two codes per byte. The scale and offset of row r and group g are at r · row_stride + g · group_stride; without
    OFFSETS the scales are read in their place. TILE columns, whose codes are packed together, are read at a time; GROUP
    is a multiple of TILE. partials and counters are as in `skinny_kernel`.

    With code = u, the product of token t and row r is Σ over groups of scale · Σ u · x + offset · total.
    """
    BYTES: tl.constexpr = K // 2
    HALF: tl.constexpr = TILE // 2
    STEPS: tl.constexpr = (K + TILE * SPLITS - 1) // (TILE * SPLITS)
    EVEN: tl.constexpr = K % (TILE * SPLITS) == 0
    kind: tl.constexpr = x.dtype.element_ty
    SCALED: tl.constexpr = kind == tl.int8
    CENTRED: tl.constexpr = SCALED and not OFFSETS
    SUM: tl.constexpr = tl.int32 if kind == tl.int8 else tl.float32
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
        if SCALED:
            token_scale = tl.load(x_scales + group * token_stride + tokens)
        scale = tl.load(scales + held_rows * row_stride + group * group_stride)
        sums = _add_group(sums, held, right, scale, token_scale, CENTRED, SCALED, SUM)
        if OP == GATE_UP:
            held_up = _load_bytes(up_rows_at, step * HALF, HALF, BYTES, EVEN)
            scale_up = tl.load(scales + up_rows * row_stride + group * group_stride)
            sums_up = _add_group(sums_up, held_up, right, scale_up, token_scale, CENTRED, SCALED, SUM)
    if CENTRED:
        sums *= 1 / CENTRED_UNIT
        sums_up *= 1 / CENTRED_UNIT
    if not SCALED:
        factor = tl.load(x_scales + tokens)[None, :] * FP8_UNIT
        sums *= factor
        sums_up *= factor
    if not CENTRED:
        sums = _add_offsets(
            sums, offsets + held_rows * row_stride, totals, tokens, split, group_stride, token_stride,
            K // GROUP, OFFSETS, SPLITS,
        )  # fmt: skip
        if OP == GATE_UP:
            sums_up = _add_offsets(
                sums_up, offsets + up_rows * row_stride, totals, tokens, split, group_stride, token_stride,
                K // GROUP, OFFSETS, SPLITS,
            )  # fmt: skip
    no_squares = tl.zeros((TOKENS,), tl.float32)
    finish_split(
        sums, sums_up, no_squares, bias, out, partials, counters, rows, tokens, split, T, N, 0.0,
        K, OP, GELU, NO_NORM, BIAS, ROWS, TOKENS, SPLITS,
    )  # fmt: skip
