"""The gated activation of the MLP, silu(gate) · up or gelu(gate) · up, of the stacked product of gate and up."""

import triton
import triton.language as tl
from torch import Tensor

from tandem.engine.kernels.triton_launch import launch_dependents, wait_for_inputs
from tandem.engine.kernels.triton_math import gelu_tanh

COLUMN_BLOCKS = (2048, 1024, 512, 256)
"""Possible numbers of columns of a program; the largest that divides the length of a row is used.

Otherwise the last program of a row would be partly empty, and cost as much as a full one.
"""
RAGGED_BLOCK = 1024
"""Number of columns of a program if none of `COLUMN_BLOCKS` divides the length of a row."""
ELEMENTS_PER_WARP = 512
"""Number of elements of a warp: two 16-byte loads of a half-precision type for each thread and input."""


def silu_mul(gate_up: Tensor, *, pdl: bool) -> Tensor:
    """Return silu(g) · u of gate_up [T, 2·I], contiguous, g first → [T, I]; computed in float32 and rounded once."""
    return _launch(gate_up, gelu=False, pdl=pdl)


def gelu_mul(gate_up: Tensor, *, pdl: bool) -> Tensor:
    """Return gelu(g) · u like `silu_mul`, with the tanh approximation of GELU."""
    return _launch(gate_up, gelu=True, pdl=pdl)


def _launch(gate_up: Tensor, *, gelu: bool, pdl: bool) -> Tensor:
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(tokens, width)
    block = next((columns for columns in COLUMN_BLOCKS if width % columns == 0), RAGGED_BLOCK)
    _gated[(tokens, triton.cdiv(width, block))](
        gate_up, out, width,
        GELU=gelu, BLOCK=block, PDL=pdl, num_warps=max(block // ELEMENTS_PER_WARP, 1), launch_pdl=pdl,
    )  # fmt: skip
    return out


@triton.jit
def gated(gate, up, GELU: tl.constexpr):
    """Return silu(gate) · up of float32 numbers, or gelu(gate) · up if GELU."""
    if GELU:
        product = gelu_tanh(gate) * up
    else:
        # Of the two forms of the sigmoid, use the one whose exponential cannot overflow.
        small = tl.exp(-tl.abs(gate))
        product = gate * tl.where(gate >= 0, 1.0, small) / (1.0 + small) * up
    return product


@triton.jit
def _gated(gate_up_ptr, out_ptr, width, GELU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    launch_dependents(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate_row = gate_up_ptr + row * (2 * width)
    gate = tl.load(gate_row + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_row + width + column, mask=inside, other=0.0).to(tl.float32)
    product = gated(gate, up, GELU)
    tl.store(out_ptr + row * width + column, product.to(out_ptr.dtype.element_ty), mask=inside)
