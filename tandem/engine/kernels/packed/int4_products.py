"""Products of 4-bit weights and 8-bit inputs on GPUs (W4A8), for steps with so many tokens that arithmetic binds.

The tensor cores multiply 8-bit codes twice as fast as 16-bit numbers, and 4-bit codes become 8-bit ones by a mask and a
shift, of four codes at a time. Inputs are quantized token by token, as in `scaled_products`: to int8 with a scale per
group of the weight, or to float8_e4m3fn with a scale per token. The products of a group are summed before they are
scaled, in int32 or float32.

For the longest steps the codes are widened once to float8_e4m3fn, which represents -8 to 7 exactly, in scratch memory,
and PyTorch's library multiplies them with a scale per row and group.
"""

import torch
import triton
from torch import Tensor

from tandem.engine.kernels.layers import Norm
from tandem.engine.kernels.linear.triton_linear import GATE_UP, early_bytes, reserve_scratch
from tandem.engine.kernels.linear.triton_linear_tiles import Skinny
from tandem.engine.kernels.packed.input_codes import quantized_input
from tandem.engine.kernels.packed.int4_tiles import least_tokens, library_tokens, tile_for
from tandem.engine.kernels.packed.scaled_weight import BLOCK, QuantizedInput
from tandem.engine.kernels.packed.triton_int4 import int4_kernel, widen_kernel
from tandem.engine.kernels.packed_weight import TILE, Float4Weight, PackedWeight
from tandem.engine.kernels.triton_launch import INTERPRETED, overlaps_launches

INPUTS = torch.float8_e4m3fn
"""The codes of inputs."""
_MOST_WIDENED = 1 << 28
"""Maximum number of elements of a weight whose widened codes are kept in scratch memory: 256 MiB."""
_INPUTS = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}
_WIDENED_COLUMNS = 1024


def multiplies(weight: PackedWeight) -> bool:
    """Return True if the kernel multiplies the weight: 4-bit integers, with groups of whole tiles of columns."""
    integers = weight.bits == 4 and not isinstance(weight, Float4Weight)
    return integers and len(weight.shape) == 2 and weight.group % TILE == 0


def quantizes_inputs(tokens: int, weight: PackedWeight, dtype: torch.dtype) -> bool:
    """Return True if a step of `tokens` tokens in `dtype` quantizes the inputs of this weight's products.

    That is from `least_tokens` on, for 16-bit inputs on GPUs whose tensor cores multiply 8 bits twice as fast.
    """
    fast = INTERPRETED or (weight.device.type == "cuda" and overlaps_launches())
    return fast and dtype != torch.float32 and multiplies(weight) and tokens >= least_tokens(*weight.shape)


def quantized(
    x: Tensor,
    norm: Norm | None,
    weight: PackedWeight,
    dtype: torch.dtype = INPUTS,
    *,
    pdl: bool,
    activation: str | None = None,
) -> QuantizedInput:
    """Quantize an input as `scaled_products.quantized` does, to codes of `dtype`, int8 or float8_e4m3fn.

    int8 codes have a scale per token and group of the weight, as their steps are equal; float8 codes have one per
    token.
    """
    columns = weight.shape[-1]
    group = weight.group if dtype == torch.int8 else columns
    return quantized_input(x, norm, columns, dtype, group, weight.group, pdl=pdl, activation=activation)


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
        tile = tile_for(_INPUTS[x.codes.dtype], tokens, len(weight), k, op == GATE_UP.value)
    grid = (triton.cdiv(tokens, tile.tokens), triton.cdiv(n, tile.rows), tile.splits)
    partials, counters = (out, out) if tile.splits == 1 else reserve_scratch(out.device)
    int4_kernel[grid](
        x.codes, x.scales, x.totals, weight.codes, weight.scales,
        weight.scales if weight.offsets is None else weight.offsets, out if bias is None else bias, out,
        partials, counters, tokens, n, x.totals.stride(0), *weight.scales.stride(),
        K=k, GROUP=weight.group, OFFSETS=weight.offsets is not None, OP=op, GELU=gelu, BIAS=bias is not None,
        ROWS=tile.rows, TOKENS=tile.tokens, TILE=TILE, SPLITS=tile.splits, STAGES=tile.stages,
        EARLY=early_bytes(weight.codes, tile) if pdl else 0, PDL=pdl, num_warps=tile.warps, launch_pdl=pdl,
    )  # fmt: skip


def uses_library(tokens: int, weight: PackedWeight, dtype: torch.dtype) -> bool:
    """Return True if PyTorch's library computes the product of a step, with results in `dtype`, and not Triton."""
    long = tokens >= library_tokens(*weight.shape) and weight.shape.numel() <= _MOST_WIDENED
    served = INPUTS.is_floating_point and dtype == torch.bfloat16 and weight.device.type == "cuda"
    return long and served and library_multiplies(weight)


def library_multiplies(weight: PackedWeight) -> bool:
    """Return True if PyTorch's library multiplies the widened codes: a scale per `BLOCK` columns, and no offsets."""
    rows = weight.shape[0]
    return multiplies(weight) and weight.group == BLOCK and weight.offsets is None and rows % 16 == 0


def library_product(x: QuantizedInput, weight: PackedWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return x · weightᵀ + bias [T, N] in `dtype`, for float8 inputs; `library_multiplies` must be True.

    The library wants a scale for each group of a token, so the token's scale is repeated.
    """
    from torch.nn.functional import ScalingType, scaled_mm

    scales = x.scales.expand(weight.scales.shape[1], -1).contiguous()
    # All rows of the memory, because the scales are column-major and have that stride.
    out = scaled_mm(
        x.codes, widened(weight).t(), scales.t(), ScalingType.BlockWise1x128,
        weight.scales, ScalingType.BlockWise1x128, output_dtype=dtype,
    )[: x.tokens]  # fmt: skip
    return out if bias is None else out.add_(bias)


def widened(weight: PackedWeight) -> Tensor:
    """Return the codes of a weight without offsets, minus 8, as float8_e4m3fn [N, K]."""
    rows, columns = weight.shape
    out = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=weight.device)
    widen_kernel[(rows, triton.cdiv(columns // 2, _WIDENED_COLUMNS))](
        weight.codes, out, K=columns, TILE=TILE, COLUMNS=_WIDENED_COLUMNS
    )
    return out
