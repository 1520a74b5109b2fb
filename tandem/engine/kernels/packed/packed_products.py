"""Products with a packed weight on GPUs, by the number of tokens that share the weight.

Up to FUSED_TOKENS tokens, the codes are unpacked in registers, as the left operand of the tensor cores. With few tokens
this saves time because codes are read instead of 16-bit numbers; with some dozens, because the tokens of a tile share
the unpacking. For more tokens the weight is dequantized into scratch memory for the products of plain weights
(`products.dequantized_for`). A weight of more than SCRATCH_ITEMS elements is dequantized some rows at a time, for the
library's product.

Activations stay in the model's dtype. The products of a group are summed before they are scaled, in float32. The same
inputs give the same bits in every run; a token's bits are the same in all steps with the same tile (`tile_for`).
"""

import math
from collections.abc import Iterator

import torch
import triton
from torch import Tensor

from tandem.engine.kernels.held_weight import multiplied_on_gpus, step_bytes
from tandem.engine.kernels.layers import Linear, Norm
from tandem.engine.kernels.linear.triton_activation import gelu_mul, silu_mul
from tandem.engine.kernels.linear.triton_linear import ADD, GATE_UP, STORE, early_bytes, reserve_scratch
from tandem.engine.kernels.linear.triton_linear_kernels import NO_NORM, NORM_LAST
from tandem.engine.kernels.linear.triton_linear_plan import FUSED_NORM_TOKENS
from tandem.engine.kernels.linear.triton_linear_tiles import Skinny
from tandem.engine.kernels.packed.float4_weight import word_scaled
from tandem.engine.kernels.packed.packed_tiles import tile_for
from tandem.engine.kernels.packed.triton_packed import dequantize_kernel, packed_kernel
from tandem.engine.kernels.packed_weight import Float4Weight, PackedWeight
from tandem.engine.kernels.rowwise.triton_norm import rms_norm

FUSED_TOKENS = 256
"""Maximum number of tokens of a step for which the product unpacks codes in registers.

In larger steps, dequantizing once costs less than dequantizing in each tile. On an H100, gate and up of llama-3-8b in
int8 take 105 µs for 128 tokens, and twice as long for 256. For 256 tokens in bfloat16 they take 102 µs, after 157 µs to
dequantize the weight.
"""
_NARROW_FUSED_TOKENS = 128
"""`FUSED_TOKENS` for weights whose scales cover so few columns that scaling costs more than unpacking codes."""
_NARROW_BYTES = 64
SCRATCH_ITEMS = 1 << 27
"""Number of elements of a weight dequantized at a time: 256 MiB in 16 bits, enough for gate and up of an 8B model."""
_DEQUANTIZED_ROWS = 64
"""Number of rows of a program that dequantizes."""


def multiplies(weight: PackedWeight) -> bool:
    """Return True if the kernels of this module multiply the weight."""
    return len(weight.shape) == 2 and multiplied_on_gpus(weight)


def prepared(weight: PackedWeight) -> PackedWeight:
    """Return a weight, or stacked weights, with float32 scales, stored so that scales of adjacent rows are adjacent.

    Scales are float32 because only loads of four bytes or more can be pipelined over several rounds of a loop; those of
    FP4 codes are bytes in words (`float4_weight`).
    """
    if isinstance(weight, Float4Weight):
        return word_scaled(weight)
    offsets = None if weight.offsets is None else _by_group(weight.offsets)
    return PackedWeight(weight.codes, _by_group(weight.scales), offsets, weight.group)


def _by_group(scales: Tensor) -> Tensor:
    return scales.transpose(-1, -2).contiguous().float().transpose(-1, -2)


def fuses(tokens: int, weight: PackedWeight) -> bool:
    """Return True if a product of `tokens` tokens unpacks codes in registers."""
    narrow = weight.group < weight.shape[1] and step_bytes(weight) < _NARROW_BYTES
    return tokens <= (min(_NARROW_FUSED_TOKENS, FUSED_TOKENS) if narrow else FUSED_TOKENS)


def norms_apart(hidden: Tensor) -> bool:
    """Return True for many tokens, and for float16, which cannot represent x ∘ norm for every x."""
    return len(hidden) > FUSED_NORM_TOKENS or hidden.dtype == torch.float16


def norm_linear(hidden: Tensor, norm: Norm | None, linear: Linear, *, pdl: bool) -> Tensor:
    """Return RMSNorm(hidden) · weightᵀ + bias → [T, N]; without `norm` the plain product."""
    x, norm = _normed(hidden, norm, pdl)
    weight = _packed(linear)
    out = x.new_empty(len(x), len(weight))
    if fuses(len(x), weight):
        launch(x, norm, linear, out, STORE.value, pdl=pdl)
    else:
        assert norm is None, "a norm is due to the product of a dequantized weight"
        multiply_dequantized(x, weight, linear.bias, out)
    return out


def multiply_dequantized(x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor) -> None:
    """Compute x · weightᵀ + bias into `out` with the library, dequantizing some rows of the weight at a time."""
    for rows, matrix in dequantized_pieces(weight, x.dtype):
        if bias is None:
            torch.mm(x, matrix.t(), out=out[:, rows])
        else:
            torch.addmm(bias[rows], x, matrix.t(), out=out[:, rows])


def norm_gate_up(hidden: Tensor, norm: Norm | None, gate_up: Linear, *, pdl: bool, activation: str = "silu") -> Tensor:
    """Return activation(g) · u with [g | u] = RMSNorm(hidden) · weightᵀ + bias, gate rows first → [T, I]."""
    gelu = activation == "gelu_tanh"
    x, norm = _normed(hidden, norm, pdl)
    weight = _packed(gate_up)
    if not fuses(len(x), weight):
        assert norm is None, "a norm is due to the product of a dequantized weight"
        both = norm_linear(x, None, gate_up, pdl=pdl)
        return gelu_mul(both, pdl=pdl) if gelu else silu_mul(both, pdl=pdl)
    out = x.new_empty(len(x), len(weight) // 2)
    launch(x, norm, gate_up, out, GATE_UP.value, pdl=pdl, gelu=gelu)
    return out


def linear_add(x: Tensor, linear: Linear, hidden: Tensor, *, pdl: bool) -> None:
    """Add x · weightᵀ + bias to hidden [T, N] in place."""
    if fuses(len(x), _packed(linear)):
        launch(x, None, linear, hidden, ADD.value, pdl=pdl)
        return
    if linear.bias is not None:
        hidden += linear.bias  # added first, where rounding loses less than after the larger product was added
    for rows, matrix in dequantized_pieces(_packed(linear), x.dtype):
        hidden[:, rows].addmm_(x, matrix.t())


def launch(
    x: Tensor,
    norm: Norm | None,
    linear: Linear,
    out: Tensor,
    op: int,
    *,
    pdl: bool,
    gelu: bool = False,
    tile: Skinny | None = None,
) -> None:
    """Launch one product into `out`, for `op` STORE, GATE_UP or ADD; `tile` None = that of `tile_for`.

    A tile's `columns` are bytes of codes; they must divide those of `tile_for`.
    """
    (tokens, k), n, weight, bias = x.shape, out.shape[1], _packed(linear), linear.bias
    if tile is None:
        tile = tile_for(tokens, len(weight), k, op == GATE_UP.value, weight.bits, step_bytes(weight))
    grid = (triton.cdiv(n, tile.rows), triton.cdiv(tokens, tile.tokens), tile.splits)
    partials, counters = (out, out) if tile.splits == 1 else reserve_scratch(x.device)
    packed_kernel[grid](
        x, x if norm is None else norm.weight, weight.codes.view(torch.int32), *scale_tensors(weight),
        x if bias is None else bias, out, partials,
        counters, tokens, n, 0.0 if norm is None else norm.eps, *scale_strides(weight),
        **code_settings(weight), K=k, OP=op, GELU=gelu,
        NORM=NO_NORM.value if norm is None else NORM_LAST.value, BIAS=bias is not None,
        ROWS=tile.rows, TOKENS=tile.tokens, COLUMNS=tile.columns, SPLITS=tile.splits, STAGES=tile.stages,
        VECTOR=min(16 // x.element_size(), tile.columns),
        EARLY=early_bytes(weight.codes, tile) if pdl else 0, PDL=pdl, num_warps=tile.warps, launch_pdl=pdl,
        maxnreg=_registers(tile),
    )  # fmt: skip


def _registers(tile: Skinny) -> int | None:
    """Return the maximum number of registers per thread, or None if there is no limit.

    The limit makes four programs of small tiles fit on a multiprocessor.
    """
    return 128 if tile.rows <= 64 and tile.tokens <= 32 else None


def dequantize(weight: PackedWeight, out: Tensor) -> None:
    """Compute the prepared weight [N, K], or stacked weights [E, N, K], into `out`, rounded once to its dtype."""
    *experts, rows, columns = weight.codes.shape
    strides = scale_strides(weight) if experts else (0, *scale_strides(weight))
    read = step_bytes(weight)
    dequantize_kernel[(triton.cdiv(columns, read), triton.cdiv(rows, _DEQUANTIZED_ROWS), *experts)](
        weight.codes.view(torch.int32), *scale_tensors(weight), out, rows, *strides, **code_settings(weight),
        K=out.shape[-1], ROWS=_DEQUANTIZED_ROWS, COLUMNS=read,
    )  # fmt: skip


def dequantized_pieces(weight: PackedWeight, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Yield some rows at a time, or some experts, dequantized into the same scratch memory, with their range."""
    n, *sizes = weight.shape
    step = min(max(SCRATCH_ITEMS // math.prod(sizes), 1), n)
    scratch = torch.empty(step, *sizes, dtype=dtype, device=weight.device)
    for first in range(0, n, step):
        rows = slice(first, min(first + step, n))
        piece = scratch[: rows.stop - first]
        dequantize(weight[rows], piece)
        yield rows, piece


def scale_tensors(weight: PackedWeight) -> tuple[Tensor, Tensor, Tensor]:
    """Return the arguments `scales`, `offsets` and `words_of_scales` of a kernel for a prepared weight."""
    if isinstance(weight, Float4Weight):
        return weight.factors, weight.factors, weight.scales
    return weight.scales, weight.scales if weight.offsets is None else weight.offsets, weight.scales


def scale_strides(weight: PackedWeight) -> tuple[int, ...]:
    """Return the strides of the scales by expert, if experts are stacked, row, group, and word of FP4 scales."""
    if isinstance(weight, Float4Weight):
        return *weight.factors.stride(), 0, weight.scales.stride(-1)
    return *weight.scales.stride(), 0


def code_settings(weight: PackedWeight) -> dict[str, int | bool]:
    """Return the arguments by which kernels are compiled for the codes of a prepared weight."""
    is_float4 = isinstance(weight, Float4Weight)
    return {
        "GROUP": weight.shape[-1] if is_float4 else weight.group,
        "BITS": weight.bits,
        "FP8": weight.codes.dtype.is_floating_point,
        "FP4": weight.group if is_float4 else 0,
        "OFFSETS": weight.offsets is not None,
    }


def _normed(hidden: Tensor, norm: Norm | None, pdl: bool) -> tuple[Tensor, Norm | None]:
    """Return the input of a product, and the norm that the product's kernel still has to apply, or None."""
    if norm is None or not norms_apart(hidden):
        return hidden, norm
    return rms_norm(hidden, norm, pdl=pdl), None


def _packed(linear: Linear) -> PackedWeight:
    assert isinstance(linear.weight, PackedWeight)
    return linear.weight
