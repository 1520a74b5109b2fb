"""The products of the chosen experts with packed weights: `tile_kernel` for codes, which are unpacked in registers."""

import triton
import triton.language as tl

from engine.kernels.experts.triton_products import finish_tile, tile_of
from engine.kernels.packed.triton_packed import CENTRE, add_products, first_column, numbers
from engine.kernels.triton_launch import launch_dependents, wait_for_inputs


@triton.jit
def _columns_at(pointers, inside, EVEN: tl.constexpr):
    """Loads codes [rows, columns], 0 for columns that are not `inside`."""
    if EVEN:
        return tl.load(pointers)
    return tl.load(pointers, mask=inside[None, :], other=0)


@triton.jit(do_not_specialize=["P", "MAX_TILES"])
def packed_tile_kernel(
    x, codes, scales, offsets, bias, weights, tiles, pairs, out, P, MAX_TILES,
    expert_stride, row_stride, group_stride,
    N: tl.constexpr, K: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, GATED: tl.constexpr,
    ACTIVATION: tl.constexpr, BIAS: tl.constexpr,
    GROUP: tl.constexpr, BITS: tl.constexpr, FP8: tl.constexpr, OFFSETS: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiplies as `tile_kernel` does; codes [E, 2·N or N, K / 8 · BITS] uint8, COLUMNS bytes at a time.

    The scale and offset of expert e, row r and group g are at e · expert_stride + r · row_stride + g · group_stride.
    Codes as in `packed_kernel`: COLUMNS bytes never cross a group.
    """
    BYTES: tl.constexpr = K * BITS // 8
    EVEN: tl.constexpr = BYTES % COLUMNS == 0
    GROUPED: tl.constexpr = GROUP < K
    MIDDLE: tl.constexpr = 0 if OFFSETS else CENTRE
    dtype: tl.constexpr = x.dtype.element_ty
    launch_dependents(PDL)
    number = tl.program_id(0)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    places = tl.arange(0, TOKENS)
    within = tl.arange(0, COLUMNS)
    wait_for_inputs(PDL)
    if number < tl.load(tiles + MAX_TILES):
        expert, pair, present = tile_of(number, tiles, pairs, places, P, E, TOKENS)
        x_at = x + (pair // TOP_K if GATED else pair)[:, None] * K
        held_rows = tl.minimum(rows, N - 1)
        rows_at = codes + (expert * (2 * N if GATED else N) + held_rows)[:, None] * BYTES
        place = expert * expert_stride + held_rows * row_stride
        scales_at, up_scales_at = scales + place, scales + place + N * row_stride
        offsets_at, up_offsets_at = offsets + place, offsets + place + N * row_stride
        sums = tl.zeros((ROWS, TOKENS), tl.float32)
        sums_up = tl.zeros((ROWS, TOKENS), tl.float32)
        totals = tl.zeros((TOKENS,), tl.float32)
        for start in tl.range(0, BYTES, COLUMNS, num_stages=STAGES):
            inside = start + within < BYTES
            held = _columns_at(rows_at + (start + within)[None, :], inside, EVEN)
            if GATED:
                held_up = _columns_at(rows_at + N * BYTES + (start + within)[None, :], inside, EVEN)
            for part in tl.static_range(8 // BITS):
                # Known to be a multiple, so that loads are wide.
                at = tl.multiple_of(first_column(start, part, K, BITS), COLUMNS)
                loaded = present[:, None] & inside[None, :]
                taken = tl.load(x_at + (at + within)[None, :], mask=loaded, other=0.0)
                total = totals
                if OFFSETS:
                    total = tl.sum(taken.to(tl.float32), axis=1)
                    totals += total
                right = tl.trans(taken)
                group = tl.minimum(at // GROUP, K // GROUP - 1)
                left = numbers(held, part, BITS, FP8, MIDDLE, dtype)
                sums = add_products(
                    sums, left, right, total, scales_at, offsets_at, group, group_stride, GROUPED, OFFSETS
                )
                if GATED:
                    left = numbers(held_up, part, BITS, FP8, MIDDLE, dtype)
                    sums_up = add_products(
                        sums_up, left, right, total, up_scales_at, up_offsets_at, group, group_stride, GROUPED, OFFSETS
                    )
        if not GROUPED:
            sums *= tl.load(scales_at)[:, None]
            if OFFSETS:
                sums += tl.load(offsets_at)[:, None] * totals[None, :]
            if GATED:
                sums_up *= tl.load(up_scales_at)[:, None]
                if OFFSETS:
                    sums_up += tl.load(up_offsets_at)[:, None] * totals[None, :]
        finish_tile(sums, sums_up, bias, weights, out, expert, pair, present, rows, N, GATED, ACTIVATION, BIAS)
