"""RMSNorm of whole rows, one program per row: each row is read once, kept in registers, and written once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine.kernels.layers import Norm
from tandem.engine.kernels.triton_launch import launch_dependents, wait_for_inputs

ELEMENTS_PER_THREAD = 16
"""Number of elements of a thread: two 16-byte loads of a half-precision type."""
THREADS_PER_WARP = 32
MOST_WARPS = 16


def rms_norm(hidden: Tensor, norm: Norm, *, pdl: bool) -> Tensor:
    """Return hidden · rsqrt(mean(hidden²) + eps) · norm over rows, computed in float32 and rounded once.

    hidden [T, H] and the norm's weight [H] have any dtype and are contiguous → [T, H] in hidden's dtype.
    """
    out = torch.empty_like(hidden)
    _launch(hidden, norm, out, adds=False, pdl=pdl)
    return out


def norm_add(x: Tensor, norm: Norm, hidden: Tensor, *, pdl: bool) -> None:
    """Add RMSNorm(x) to `hidden` in place, both [T, H] contiguous; computed in float32 and rounded once."""
    _launch(x, norm, hidden, adds=True, pdl=pdl)


def _launch(x: Tensor, norm: Norm, out: Tensor, *, adds: bool, pdl: bool) -> None:
    tokens, width = x.shape
    block = triton.next_power_of_2(width)
    warps = min(max(block // (ELEMENTS_PER_THREAD * THREADS_PER_WARP), 1), MOST_WARPS)
    _rms_norm[(tokens,)](
        x, norm.weight, out, norm.eps, width, BLOCK=block, ADDS=adds, PDL=pdl, num_warps=warps, launch_pdl=pdl
    )


@triton.jit
def _rms_norm(hidden_ptr, norm_ptr, out_ptr, eps, width, BLOCK: tl.constexpr, ADDS: tl.constexpr, PDL: tl.constexpr):
    launch_dependents(PDL)
    column = tl.arange(0, BLOCK)
    inside = column < width
    # No earlier kernel writes a weight, so it is loaded while the kernel before still runs.
    weight = tl.load(norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64) * width
    x = tl.load(hidden_ptr + row + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / width + eps)
    normed = x * scale * weight
    if ADDS:
        normed += tl.load(out_ptr + row + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row + column, normed.to(out_ptr.dtype.element_ty), mask=inside)
