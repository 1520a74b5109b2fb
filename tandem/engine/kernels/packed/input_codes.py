"""Quantizes the inputs of products to 8-bit codes, token by token, after the norm or activation before the product."""

import torch
import triton
from torch import Tensor

from tandem.engine.kernels.layers import Norm
from tandem.engine.kernels.packed.scaled_weight import ROW_TILE, QuantizedInput
from tandem.engine.kernels.packed.triton_scaled import quantize_kernel

_ELEMENTS_PER_WARP = 512
_MOST_WARPS = 16


def quantized_input(
    x: Tensor,
    norm: Norm | None,
    columns: int,
    dtype: torch.dtype,
    group: int,
    total: int | None,
    *,
    pdl: bool,
    activation: str | None = None,
) -> QuantizedInput:
    """Quantize RMSNorm(x), or x [T, columns] without a norm, to codes of `dtype` with one scale per token and group.

    With `activation` the input is activation(g) · u of x = [g | u] [T, 2 · columns]. It is computed in float32; scale =
    max |value| / largest code. With `total` the sums of each `total` columns are computed too; then `total` is `group`,
    or `group` is `columns`.
    """
    tokens = len(x)
    memory = triton.cdiv(tokens, ROW_TILE) * ROW_TILE
    # Zeros for the interpreter on CPUs, which warns of arithmetic with undefined numbers.
    empty = torch.empty if x.is_cuda else torch.zeros
    codes = empty(memory, columns, dtype=dtype, device=x.device)
    scales = empty(columns // group, memory, dtype=torch.float32, device=x.device)
    totals = None if total is None else empty(columns // total, memory, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(columns)
    quantize_kernel[(tokens,)](
        x, x if norm is None else norm.weight, codes, scales, scales if totals is None else totals,
        0.0 if norm is None else norm.eps, memory,
        K=columns, GROUP=block if group == columns else group, TOTAL=total or 0, NORM=norm is not None,
        GATED=activation is not None, GELU=activation == "gelu_tanh", FP8=dtype == torch.float8_e4m3fn,
        BLOCK=block, PDL=pdl, num_warps=min(max(block // _ELEMENTS_PER_WARP, 1), _MOST_WARPS), launch_pdl=pdl,
    )  # fmt: skip
    return QuantizedInput(codes, scales, tokens, totals)
