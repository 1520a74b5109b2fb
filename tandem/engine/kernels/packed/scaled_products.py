"""Products with 8-bit inputs on GPUs, of weights of 8 bits or, see `w4a8_products`, 4 bits.

One kernel applies the norm, if there is one, and quantizes the input token by token. The codes do not depend on the
number of tokens in the step, so a token's output differs between steps only by the order of accumulation
(docs/decisions/quantized_weights.md). A Triton kernel multiplies int8, and FP8 up to LIBRARY_TOKENS tokens; PyTorch's
library multiplies FP8 in larger steps, if it has the product.

The memory of quantized inputs is padded to whole tiles of tokens, so that no kernel reads outside of the memory.
Results for the padding are not stored.
"""

import torch
import triton
from torch import Tensor

from tandem.engine.kernels.layers import DenseLayer, Linear, Norm
from tandem.engine.kernels.linear.triton_activation import gelu_mul, silu_mul
from tandem.engine.kernels.linear.triton_linear import ADD, GATE_UP, STORE, early_bytes, reserve_scratch
from tandem.engine.kernels.linear.triton_linear_tiles import Gemv, Tile
from tandem.engine.kernels.packed import packed_products, w4a8_products
from tandem.engine.kernels.packed.input_codes import quantized_input
from tandem.engine.kernels.packed.library_products import block_scales, library_product
from tandem.engine.kernels.packed.scaled_tiles import tile_for
from tandem.engine.kernels.packed.scaled_weight import QuantizedInput, ScaledWeight
from tandem.engine.kernels.packed.triton_scaled import scaled_gemv_kernel, scaled_kernel
from tandem.engine.kernels.packed_weight import PackedWeight

LIBRARY_TOKENS = 128
"""Maximum number of tokens for which Triton computes FP8 products; with more, reading weights is not the bottleneck.

A layer of llama-3-8b on an H100, in µs, by Triton and by the library: 99 and 122 for 64 tokens, 103 and 123 for 128.
"""
_LEAST_GROUP = 32
"""Minimum number of columns of 8-bit codes that the tensor cores multiply."""


def multiplies(weight: PackedWeight) -> bool:
    """Return True if the kernels of this module, which take 8-bit inputs, multiply the weight."""
    columns, group = weight.shape[-1], weight.group
    wide = group == columns or (group >= _LEAST_GROUP and group & (group - 1) == 0)
    return weight.quantized_inputs and wide


def prepared(weight: PackedWeight) -> ScaledWeight:
    """Return the weight with its scales in the forms that the Triton kernels and the library read."""
    scales = packed_products.prepared(weight).scales
    return ScaledWeight(weight.codes, scales, None, weight.group, block_scales(weight.codes, scales, weight.group))


def uses_library(tokens: int, weight: PackedWeight, dtype: torch.dtype) -> bool:
    """Return True if PyTorch's library computes the product with results in `dtype`, and not Triton.

    The library computes bfloat16 results for more than LIBRARY_TOKENS tokens, if the codes are FP8 with one scale per
    row or with scales in blocks, and both dimensions are multiples of 16.
    """
    if not isinstance(weight, ScaledWeight):
        return w4a8_products.uses_library(tokens, weight, dtype)
    rows, columns = weight.shape
    served = (
        weight.codes.dtype == torch.float8_e4m3fn
        and dtype == torch.bfloat16
        and rows % 16 == columns % 16 == 0
        and (weight.group == columns or weight.block_scales is not None)
    )
    return served and weight.codes.is_cuda and tokens > LIBRARY_TOKENS


def norm_linear(hidden: Tensor, norm: Norm | None, linear: Linear, *, pdl: bool) -> Tensor:
    """Return RMSNorm(hidden) · weightᵀ + bias → [T, N]; without `norm` the plain product."""
    weight = _packed(linear)
    x = quantized(hidden, norm, weight, pdl=pdl)
    if uses_library(x.tokens, weight, hidden.dtype):
        return _library_product(x, weight, linear.bias, hidden.dtype)
    out = hidden.new_empty(len(hidden), len(weight))
    launch(x, weight, linear.bias, out, STORE.value, pdl=pdl)
    return out


def norm_gate_up(hidden: Tensor, norm: Norm | None, gate_up: Linear, *, pdl: bool, activation: str = "silu") -> Tensor:
    """Return activation(g) · u with [g | u] = RMSNorm(hidden) · weightᵀ + bias, gate rows first → [T, I]."""
    gelu = activation == "gelu_tanh"
    weight = _packed(gate_up)
    x = quantized(hidden, norm, weight, pdl=pdl)
    if uses_library(x.tokens, weight, hidden.dtype):
        both = _library_product(x, weight, gate_up.bias, hidden.dtype)
        return gelu_mul(both, pdl=pdl) if gelu else silu_mul(both, pdl=pdl)
    out = hidden.new_empty(len(hidden), len(weight) // 2)
    launch(x, weight, gate_up.bias, out, GATE_UP.value, pdl=pdl, gelu=gelu)
    return out


def linear_add(x: Tensor, linear: Linear, hidden: Tensor, *, pdl: bool) -> None:
    """Add x · weightᵀ + bias to hidden [T, N] in place."""
    _add(quantized(x, None, _packed(linear), pdl=pdl), linear, hidden, pdl=pdl)


def norms_apart(hidden: Tensor) -> bool:
    """Return False: the kernel that quantizes the input applies the norm."""
    return False


def feed_forward(hidden: Tensor, layer: DenseLayer, *, pdl: bool) -> None:
    """Add a feed-forward network to hidden [T, H] in place, see `Products.feed_forward`.

    If the library computes gate and up, one launch computes the activation and quantizes it.
    """
    gate_up, down, activation = layer.gate_up, layer.down, layer.activation
    weight = _packed(gate_up)
    if not uses_library(len(hidden), weight, hidden.dtype):
        active = norm_gate_up(hidden, layer.norm, gate_up, pdl=pdl, activation=activation)
        linear_add(active, down, hidden, pdl=pdl)
        return
    both = _library_product(quantized(hidden, layer.norm, weight, pdl=pdl), weight, gate_up.bias, hidden.dtype)
    _add(quantized(both, None, _packed(down), pdl=pdl, activation=activation), down, hidden, pdl=pdl)


def _add(x: QuantizedInput, linear: Linear, hidden: Tensor, *, pdl: bool) -> None:
    weight = _packed(linear)
    if uses_library(x.tokens, weight, hidden.dtype):
        hidden += _library_product(x, weight, linear.bias, hidden.dtype)
    else:
        launch(x, weight, linear.bias, hidden, ADD.value, pdl=pdl)


def _library_product(x: QuantizedInput, weight: PackedWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    if isinstance(weight, ScaledWeight):
        return library_product(x, weight, bias, dtype)
    return w4a8_products.library_product(x, weight, bias, dtype)


def quantized(
    x: Tensor, norm: Norm | None, weight: PackedWeight, *, pdl: bool, activation: str | None = None
) -> QuantizedInput:
    """Quantize RMSNorm(x), or x [T, K] without a norm, to the weight's code dtype with one scale per token and group.

    With `activation` the input is activation(g) · u of x = [g | u] [T, 2·K]. It is computed in float32; scale = max
    |value| / largest code.
    """
    if weight.bits == 4:
        return w4a8_products.quantized(x, norm, weight, pdl=pdl, activation=activation)
    columns, dtype = weight.shape[-1], weight.codes.dtype
    return quantized_input(x, norm, columns, dtype, weight.group, None, pdl=pdl, activation=activation)


def launch(
    x: QuantizedInput,
    weight: PackedWeight,
    bias: Tensor | None,
    out: Tensor,
    op: int,
    *,
    pdl: bool,
    gelu: bool = False,
    tile: Tile | None = None,
) -> None:
    """Launch Triton's product into `out`, for `op` STORE, GATE_UP or ADD; `tile` None = that of `tile_for`.

    A tile's `tokens` must divide `ROW_TILE`, and its `columns` those of `tile_for`. A `Gemv` is for one token and FP8
    codes with one scale per row.
    """
    if weight.bits == 4:
        assert not isinstance(tile, Gemv)
        w4a8_products.launch(x, weight, bias, out, op, pdl=pdl, gelu=gelu, tile=tile)
        return
    tokens, n, k = len(out), out.shape[1], weight.shape[1]
    if tile is None:
        # The sums of int8 codes would not be exact without tensor cores, so a single token has the tile of two.
        least = 1 if weight.codes.is_floating_point() else 2
        tile = tile_for(max(tokens, least), n, k, op == GATE_UP.value, weight.group)
    if isinstance(tile, Gemv):
        scaled_gemv_kernel[(triton.cdiv(n, tile.rows),)](
            x.codes, x.scales, weight.codes, weight.scales, out if bias is None else bias, out, n,
            weight.scales.stride(0), K=k, OP=op, GELU=gelu, BIAS=bias is not None, ROWS=tile.rows,
            COLUMNS=tile.columns, VECTOR=16, PDL=pdl, num_warps=tile.warps, launch_pdl=pdl,
        )  # fmt: skip
        return
    grid = (triton.cdiv(tokens, tile.tokens), triton.cdiv(n, tile.rows), tile.splits)
    partials, counters = (out, out) if tile.splits == 1 else reserve_scratch(out.device)
    scaled_kernel[grid](
        x.codes, x.scales, weight.codes, weight.scales, out if bias is None else bias, out,
        partials, counters, tokens, n, x.scales.stride(0), *weight.scales.stride(),
        K=k, GROUP=weight.group, OP=op, GELU=gelu, BIAS=bias is not None,
        ROWS=tile.rows, TOKENS=tile.tokens, COLUMNS=tile.columns, SPLITS=tile.splits, STAGES=tile.stages,
        EARLY=early_bytes(weight.codes, tile) if pdl else 0, PDL=pdl, num_warps=tile.warps, launch_pdl=pdl,
    )  # fmt: skip


def _packed(linear: Linear) -> PackedWeight:
    assert isinstance(linear.weight, PackedWeight)
    return linear.weight
