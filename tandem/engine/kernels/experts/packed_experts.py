"""Packed expert weights on GPUs: their preparation, and the launch of their products.

Steps of one token also use tiles, unlike those with plain weights. Inputs stay in the model's dtype, unless the weight
is one for quantized inputs (`scaled_experts`). In long steps the weights are dequantized first, some experts at a time,
for the products of plain weights.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine.kernels.experts import scaled_experts
from tandem.engine.kernels.experts.expert_tiles import (
    QUANTIZED_INPUTS,
    ExpertTile,
)
from tandem.engine.kernels.experts.triton_products import RELU2, finish_tile, tile_of
from tandem.engine.kernels.held_weight import multiplied_on_gpus, step_bytes
from tandem.engine.kernels.layers import Experts, with_linears
from tandem.engine.kernels.packed import packed_products, products, scaled_products
from tandem.engine.kernels.packed.scaled_weight import ScaledWeight
from tandem.engine.kernels.packed.triton_float4 import scale_words
from tandem.engine.kernels.packed.triton_packed import add_step, columns_of, finish_sums, words_at
from tandem.engine.kernels.packed_weight import Float4Weight, PackedWeight, Weight
from tandem.engine.kernels.triton_launch import launch_dependents, wait_for_inputs
from tandem.engine.kernels.unpacked import as_matrix


@triton.jit(do_not_specialize=["P", "MAX_TILES"])
def packed_tile_kernel(
    x, codes, scales, offsets, words_of_scales, bias, weights, tiles, pairs, out, P, MAX_TILES,
    expert_stride, row_stride, group_stride, word_stride,
    N: tl.constexpr, K: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, GATED: tl.constexpr,
    ACTIVATION: tl.constexpr, BIAS: tl.constexpr,
    GROUP: tl.constexpr, BITS: tl.constexpr, FP8: tl.constexpr, FP4: tl.constexpr, OFFSETS: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply as `tile_kernel` does, with packed weights: codes [E, 2·N or N, K / 32 · BITS] words of int32.

    The scale and offset of expert e, row r and group g are at e · expert_stride + r · row_stride + g · group_stride.
    The layout of the codes, the COLUMNS bytes that are read at a time, and `words_of_scales` are as in `packed_kernel`;
    the words of different experts follow one another.
    """
    UP: tl.constexpr = GATED and ACTIVATION != RELU2
    BYTES: tl.constexpr = K * BITS // 8
    EVEN: tl.constexpr = BYTES % COLUMNS == 0
    EXPERT_ROWS: tl.constexpr = 2 * N if UP else N
    launch_dependents(PDL)
    number = tl.program_id(0)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    places = tl.arange(0, TOKENS)
    wait_for_inputs(PDL)
    if number < tl.load(tiles + MAX_TILES):
        expert, pair, present = tile_of(number, tiles, pairs, places, P, E, TOKENS)
        x_at = x + (pair // TOP_K if GATED else pair)[:, None] * K
        held_rows = tl.minimum(rows, N - 1)
        rows_at = codes + (expert * EXPERT_ROWS + held_rows) * (BYTES // 4)
        place = expert * expert_stride + held_rows * row_stride
        scales_at, up_scales_at = scales + place, scales + place + N * row_stride
        offsets_at, up_offsets_at = offsets + place, offsets + place + N * row_stride
        scale_words_at = words_of_scales + expert * (word_stride * scale_words(K, FP4)) + held_rows
        sums = tl.zeros((ROWS, TOKENS), tl.float32)
        sums_up = tl.zeros((ROWS, TOKENS), tl.float32)
        totals = tl.zeros((ROWS, TOKENS), tl.float32)
        for start in tl.range(0, BYTES, COLUMNS, num_stages=STAGES):
            words = start // 4 + tl.arange(0, COLUMNS // 4)
            held = words_at(rows_at, words, words < BYTES // 4, EVEN)
            held_up = held
            if UP:
                held_up = words_at(rows_at + N * (BYTES // 4), words, words < BYTES // 4, EVEN)
            at, inside = columns_of(start, K, BITS, FP4, COLUMNS)
            taken = tl.load(x_at + at[None, :], mask=present[:, None] & inside[None, :], other=0.0)
            sums, sums_up, totals = add_step(
                sums, sums_up, totals, held, held_up, taken, scales_at, up_scales_at, offsets_at, up_offsets_at,
                scale_words_at, scale_words_at + N, start, group_stride, word_stride,
                K, GROUP, BITS, FP8, FP4, OFFSETS, UP,
            )  # fmt: skip
        sums = finish_sums(sums, totals, scales_at, offsets_at, K, GROUP, BITS, OFFSETS)
        if UP:
            sums_up = finish_sums(sums_up, totals, up_scales_at, up_offsets_at, K, GROUP, BITS, OFFSETS)
        finish_tile(sums, sums_up, bias, weights, out, expert, pair, present, rows, N, GATED, ACTIVATION, BIAS)


def prepared_experts(experts: Experts, dtype: torch.dtype) -> Experts:
    """Return the experts with packed weights as kernels read them, or dequantized if no kernel multiplies them."""
    experts = replace(experts, gate_up=_prepared(experts.gate_up, dtype), down=_prepared(experts.down, dtype))
    return with_linears(experts, partial(products.prepared, dtype=dtype))


def _prepared(weight: Weight, dtype: torch.dtype) -> Weight:
    """Return stacked weights in the form that kernels read, or dequantized if no kernel multiplies them."""
    if not isinstance(weight, PackedWeight) or not multiplied_on_gpus(weight):
        return as_matrix(weight, dtype)
    if scaled_products.multiplies(weight):
        return scaled_experts.prepared(weight)
    return packed_products.prepared(weight)


def form_of(experts: Experts) -> str | None:
    """Return the codes of prepared weights, and whether inputs are quantized, as `PACKED_TUNED` names them.

    Returns None if neither weight is packed.
    """
    for weight in (experts.gate_up, experts.down):
        if isinstance(weight, PackedWeight):
            kind = "fp" if isinstance(weight, Float4Weight) or weight.codes.dtype.is_floating_point else "int"
            return f"{kind}{weight.bits}" + (QUANTIZED_INPUTS if isinstance(weight, ScaledWeight) else "")
    return None


def dequantizes(form: str | None, tokens: float, dtype: torch.dtype) -> bool:
    """Return True if steps with this mean number of tokens per expert dequantize packed weights of this form first.

    In float32 no step does, because then a token's results would depend on the number of other tokens.
    """
    if form is None or form.endswith(QUANTIZED_INPUTS) or dtype == torch.float32:
        return False
    return tokens > packed_products.FUSED_TOKENS


def matrices_of(weight: Weight, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Yield the experts' weights, all at once or dequantized some at a time, with the range of these experts."""
    if isinstance(weight, PackedWeight):
        yield from packed_products.dequantized_pieces(weight, dtype)
    else:
        yield slice(0, len(weight)), weight


def launch(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    pair_weights: Tensor,
    tiles: Tensor,
    order: Tensor,
    out: Tensor,
    tile: ExpertTile,
    *,
    top_k: int,
    activation: int | None,
    pdl: bool,
) -> None:
    """Launch `packed_tile_kernel`, or for quantized inputs `scaled_tile_kernel`, for all tiles.

    `activation` is the activation of the gated product; None means the down product.
    """
    product = tile.down if activation is None else tile.gate_up
    pairs, outputs = out.shape
    most = len(tiles) - 1
    grid = (most, triton.cdiv(outputs, product.rows))
    any_bias = x if bias is None else bias
    settings = {
        "N": outputs, "K": x.shape[1], "E": len(weight), "TOP_K": top_k, "GATED": activation is not None,
        "ACTIVATION": activation or 0, "BIAS": bias is not None, "ROWS": product.rows, "TOKENS": tile.tokens,
        "STAGES": product.stages, "PDL": pdl, "num_warps": product.warps, "launch_pdl": pdl,
    }  # fmt: skip
    if isinstance(weight, ScaledWeight):
        taken = scaled_products.quantized(x, None, weight, pdl=pdl)
        columns = product.columns if weight.group == x.shape[1] else min(product.columns, weight.group)
        scaled_experts.scaled_tile_kernel[grid](
            taken.codes, taken.scales, weight.codes, weight.scales, any_bias, pair_weights, tiles, order, out, pairs,
            most, taken.scales.stride(0), *weight.scales.stride(),
            GROUP=weight.group, COLUMNS=columns, **settings,
        )  # fmt: skip
        return
    columns = step_bytes(weight)
    if isinstance(weight, Float4Weight):
        columns = max(product.columns, columns)
    packed_tile_kernel[grid](
        x, weight.codes.view(torch.int32), *packed_products.scale_tensors(weight), any_bias, pair_weights,
        tiles, order, out, pairs, most, *packed_products.scale_strides(weight),
        **packed_products.code_settings(weight), COLUMNS=columns, **settings,
    )  # fmt: skip
