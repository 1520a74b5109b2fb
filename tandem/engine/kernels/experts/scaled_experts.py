"""Expert weights of 8-bit codes on GPUs, multiplied by inputs of 8-bit codes, as `scaled_products` does for matrices.

`packed_experts.launch` quantizes the inputs of both products in launches of their own, token by token, so a token's
codes do not depend on the other tokens. The tensor cores multiply 8-bit codes at twice the rate of 16-bit numbers, and
no code is converted.
"""

import triton
import triton.language as tl

from tandem.engine.kernels.experts.triton_products import RELU2, finish_tile, tile_of
from tandem.engine.kernels.packed import packed_products
from tandem.engine.kernels.packed.scaled_weight import ScaledWeight
from tandem.engine.kernels.packed.triton_scaled import add_products, load_columns
from tandem.engine.kernels.packed_weight import PackedWeight
from tandem.engine.kernels.triton_launch import launch_dependents, wait_for_inputs


@triton.jit(do_not_specialize=["P", "MAX_TILES"])
def scaled_tile_kernel(
    x, x_scales, codes, scales, bias, weights, tiles, pairs, out, P, MAX_TILES,
    token_stride, expert_stride, row_stride, group_stride,
    N: tl.constexpr, K: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, GATED: tl.constexpr,
    ACTIVATION: tl.constexpr, BIAS: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply as `tile_kernel` does, with 8-bit codes of inputs and weights of the same dtype.

    The scale of input row t and group g is at g · token_stride + t; that of expert e, row r and group g is at
    e · expert_stride + r · row_stride + g · group_stride. COLUMNS columns are read at a time, all of one group.
    """
    UP: tl.constexpr = GATED and ACTIVATION != RELU2
    EVEN: tl.constexpr = K % COLUMNS == 0
    EXPERT_ROWS: tl.constexpr = 2 * N if UP else N
    GROUPED: tl.constexpr = GROUP < K
    SUM: tl.constexpr = tl.int32 if codes.dtype.element_ty == tl.int8 else tl.float32
    launch_dependents(PDL)
    number = tl.program_id(0)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    places = tl.arange(0, TOKENS)
    columns = tl.arange(0, COLUMNS)
    wait_for_inputs(PDL)
    if number < tl.load(tiles + MAX_TILES):
        # Places without a pair read the input of some pair; their results are not stored.
        expert, pair, present = tile_of(number, tiles, pairs, places, P, E, TOKENS)
        token = pair // TOP_K if GATED else pair
        x_at = x + token[:, None] * K
        held_rows = tl.minimum(rows, N - 1)
        rows_at = codes + (expert * EXPERT_ROWS + held_rows)[:, None] * K
        scales_at = scales + expert * expert_stride + held_rows * row_stride
        up_scales_at = scales_at + N * row_stride
        sums = tl.zeros((ROWS, TOKENS), tl.float32 if GROUPED else SUM)
        sums_up = tl.zeros((ROWS, TOKENS), tl.float32 if GROUPED else SUM)
        for start in tl.range(0, K, COLUMNS, num_stages=STAGES):
            at = start + columns
            inside = at < K
            scale, scale_up, token_scale = 0.0, 0.0, 0.0
            if GROUPED:
                group = tl.minimum(start // GROUP, K // GROUP - 1)
                scale = tl.load(scales_at + group * group_stride)
                token_scale = tl.load(x_scales + group * token_stride + token)
            held = load_columns(rows_at + at[None, :], inside, EVEN, "")
            taken = tl.trans(load_columns(x_at + at[None, :], inside, EVEN, ""))
            sums = add_products(held, taken, sums, scale, token_scale, GROUPED, SUM)
            if UP:
                if GROUPED:
                    scale_up = tl.load(up_scales_at + group * group_stride)
                held_up = load_columns(rows_at + N * K + at[None, :], inside, EVEN, "")
                sums_up = add_products(held_up, taken, sums_up, scale_up, token_scale, GROUPED, SUM)
        total = sums.to(tl.float32)
        total_up = sums_up.to(tl.float32)
        if not GROUPED:
            token_scale = tl.load(x_scales + token)[None, :]
            total *= tl.load(scales_at)[:, None] * token_scale
            if UP:
                total_up *= tl.load(up_scales_at)[:, None] * token_scale
        finish_tile(total, total_up, bias, weights, out, expert, pair, present, rows, N, GATED, ACTIVATION, BIAS)


def prepared(weight: PackedWeight) -> ScaledWeight:
    """Return stacked weights with their scales in the form that the kernel reads."""
    scales = packed_products.prepared(weight).scales
    return ScaledWeight(weight.codes, scales, None, weight.group, block_scales=None)
