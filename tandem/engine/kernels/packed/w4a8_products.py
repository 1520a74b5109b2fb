"""Products of 4-bit weights and 8-bit inputs on GPUs (W4A8), for steps with so many tokens that arithmetic binds.

The tensor cores multiply FP8 twice as fast as 16-bit numbers, and 4-bit codes become FP8 by a mask and a shift, of four
codes at a time. Inputs are quantized token by token, as in `scaled_products`. The products of a group are summed before
they are scaled, in float32.

For the longest steps the codes are widened once to float8_e4m3fn in scratch memory, for PyTorch's library. Those of
integers, -8 to 7, keep their scales per row and group. Those of MXFP4 are multiplied by their scales, which are powers
of two, and by a power of two for each row. This is exact for scales of at least 2⁻¹⁴ of the largest of the row; others
lose bits below 2⁻¹⁵ of it. MXFP4 has no product of its own: a group of 32 columns is a single instruction of the tensor
cores, whose result would have to be scaled before the next.
"""

import torch
import triton
from torch import Tensor

from tandem.engine.kernels.layers import Norm
from tandem.engine.kernels.linear.triton_linear import GATE_UP, early_bytes, reserve_scratch
from tandem.engine.kernels.linear.triton_linear_tiles import Skinny
from tandem.engine.kernels.packed.float4_weight import SCALES_A_WORD, WordScaledWeight
from tandem.engine.kernels.packed.input_codes import quantized_input
from tandem.engine.kernels.packed.library_products import library_product as row_product
from tandem.engine.kernels.packed.packed_products import dequantize
from tandem.engine.kernels.packed.scaled_weight import BLOCK, QuantizedInput, ScaledWeight
from tandem.engine.kernels.packed.triton_w4a8 import w4a8_kernel
from tandem.engine.kernels.packed.w4a8_tiles import least_tokens, library_tokens, tile_for
from tandem.engine.kernels.packed_weight import TILE, Float4Weight, PackedWeight
from tandem.engine.kernels.triton_launch import INTERPRETED, overlaps_launches

GROUPED = False
"""True if inputs have a scale per token and group, False if they have one per token."""
_MOST_WIDENED = 1 << 28
"""Maximum number of elements of a weight whose widened codes are kept in scratch memory: 256 MiB."""
_MXFP4_GROUP = 32
_ONE, _TOP = 253, 6
"""The exponent of a scale byte of 0 (`float4_weight`), and that of the largest scale of a row of widened codes.

The largest E2M1 number, 6, becomes 384; the largest number of float8_e4m3fn is 448.
"""


def multiplies(weight: PackedWeight) -> bool:
    """Return True if the kernel multiplies the weight: 4-bit integers in groups of the columns packed together."""
    integers = weight.bits == 4 and not isinstance(weight, Float4Weight)
    return integers and len(weight.shape) == 2 and weight.group == TILE


def quantizes_inputs(tokens: int, weight: PackedWeight, dtype: torch.dtype) -> bool:
    """Return True if a step of `tokens` tokens in `dtype` quantizes the inputs of this weight's products.

    That is from `least_tokens` on, for 16-bit inputs on GPUs whose tensor cores multiply 8 bits twice as fast.
    """
    fast = INTERPRETED or (weight.device.type == "cuda" and overlaps_launches())
    many = multiplies(weight) and tokens >= least_tokens(*weight.shape)
    return fast and dtype != torch.float32 and (many or uses_library(tokens, weight, dtype))


def quantized(
    x: Tensor,
    norm: Norm | None,
    weight: PackedWeight,
    *,
    pdl: bool,
    activation: str | None = None,
    grouped: bool = GROUPED,
) -> QuantizedInput:
    """Quantize an input as `scaled_products.quantized` does, to float8_e4m3fn.

    There is one scale per token or, if `grouped`, per token and group of an integer weight.
    """
    columns = weight.shape[-1]
    total = weight.group if multiplies(weight) else None
    group = total if grouped and total else columns
    return quantized_input(x, norm, columns, torch.float8_e4m3fn, group, total, pdl=pdl, activation=activation)


def launch(
    x: QuantizedInput,
    weight: PackedWeight,
    bias: Tensor | None,
    out: Tensor,
    op: int,
    *,
    pdl: bool,
    gelu: bool = False,
    tile: Skinny | None = None,
) -> None:
    """Launch the product into `out`, for `op` STORE, GATE_UP or ADD; `tile` None = that of `tile_for`.

    `weight` is one that `packed_products.prepared` returned. A tile's `tokens` must divide `ROW_TILE`; its `columns`
    are not used.
    """
    tokens, n, k = len(out), out.shape[1], weight.shape[1]
    assert x.totals is not None
    if tile is None:
        tile = tile_for(tokens, len(weight), k, op == GATE_UP.value)
    grid = (triton.cdiv(tokens, tile.tokens), triton.cdiv(n, tile.rows), tile.splits)
    partials, counters = (out, out) if tile.splits == 1 else reserve_scratch(out.device)
    w4a8_kernel[grid](
        x.codes, x.scales, x.totals, weight.codes, weight.scales,
        weight.scales if weight.offsets is None else weight.offsets, out if bias is None else bias, out,
        partials, counters, tokens, n, x.totals.stride(0), *weight.scales.stride(),
        K=k, GROUPED=x.scales.shape[0] > 1, OFFSETS=weight.offsets is not None,
        OP=op, GELU=gelu, BIAS=bias is not None,
        ROWS=tile.rows, TOKENS=tile.tokens, TILE=TILE, SPLITS=tile.splits, STAGES=tile.stages,
        EARLY=early_bytes(weight.codes, tile) if pdl else 0, PDL=pdl, num_warps=tile.warps, launch_pdl=pdl,
        maxnreg=_registers(tile, paired=op == GATE_UP.value),
    )  # fmt: skip


def _registers(tile: Skinny, *, paired: bool) -> int | None:
    """Return the maximum number of registers per thread, or None if there is no limit.

    The limits let three or four programs run on a multiprocessor, so that some compute while others wait; the loop's
    numbers still fit, as the compiler's output shows. Programs of 128 tokens would move numbers to memory.
    """
    if tile.rows > 64 or tile.tokens > 64:
        return None
    return 168 if paired and tile.tokens == 64 else 128


def uses_library(tokens: int, weight: PackedWeight, dtype: torch.dtype) -> bool:
    """Return True if PyTorch's library computes the product of a step, with results in `dtype`, and not Triton."""
    long = tokens >= library_tokens(*weight.shape) and weight.shape.numel() <= _MOST_WIDENED
    return long and dtype == torch.bfloat16 and weight.device.type == "cuda" and library_multiplies(weight)


def library_multiplies(weight: PackedWeight) -> bool:
    """Return True if PyTorch's library multiplies the widened codes.

    It multiplies integers without offsets, with a scale per `BLOCK` columns, and MXFP4; dimensions are multiples of 16.
    """
    if weight.bits != 4 or len(weight.shape) != 2 or weight.shape[0] % 16 or weight.shape[1] % 16:
        return False
    if isinstance(weight, Float4Weight):
        return weight.group == _MXFP4_GROUP
    return weight.group == BLOCK and weight.offsets is None


def library_product(x: QuantizedInput, weight: PackedWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return x · weightᵀ + bias [T, N] in `dtype`; `library_multiplies` must be True."""
    if isinstance(weight, Float4Weight):
        return row_product(x, widened_float4(weight), bias, dtype)
    from torch.nn.functional import ScalingType, scaled_mm

    # The library wants a scale for each group of a token, and all rows of the memory: their number is the stride.
    scales = x.scales.expand(weight.scales.shape[1], -1).contiguous()
    out = scaled_mm(
        x.codes, widened(weight).t(), scales.t(), ScalingType.BlockWise1x128,
        weight.scales, ScalingType.BlockWise1x128, output_dtype=dtype,
    )[: x.tokens]  # fmt: skip
    return out if bias is None else out.add_(bias)


def widened(weight: PackedWeight) -> Tensor:
    """Return the codes of integers without offsets, minus 8, as float8_e4m3fn [N, K]."""
    rows, columns = weight.shape
    out = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=weight.device)
    dequantize(PackedWeight(weight.codes, weight.scales.new_ones(1, 1).expand(rows, 1), None, columns), out)
    return out


def widened_float4(weight: Float4Weight) -> ScaledWeight:
    """Return an MXFP4 weight that `packed_products.prepared` returned with float8_e4m3fn codes and a scale per row."""
    rows, columns = weight.shape
    held = weight.scales.t().contiguous().view(torch.uint8).view(-1, rows, SCALES_A_WORD)
    # With the scale byte b, a code of 1 is 2 ** (b - _ONE); the largest group's becomes 2 ** _TOP.
    powers = torch.exp2((_ONE + _TOP - held.amax((0, 2)).float()).clamp(max=127))
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=weight.device)
    dequantize(WordScaledWeight(weight.codes, weight.scales, None, weight.group, powers), codes)
    return ScaledWeight(codes, (weight.factors / powers)[:, None], None, columns, None)
