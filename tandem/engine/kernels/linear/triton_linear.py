"""Products of a few tokens and a large weight, whose speed is limited by the memory bandwidth of reading the weight.

y = RMSNorm(x) · weightᵀ = rsqrt(mean(x²) + eps) · ((x ∘ norm) · weightᵀ): the loop that multiplies also sums the
squares, and their mean scales the result at the end. Activation and residual are applied before the result is stored.

For one token in bfloat16 or float16 a program holds a few rows of the weight in registers and multiplies in float32.
For more tokens, and for float32, `tl.dot` takes the weight as its left operand and sums in float32; float32 operands
are not rounded. If there are few outputs, several programs share the columns of a tile, and the last of them to arrive
adds their sums in a fixed order.

The same inputs give the same bits in every run. For float32 a token's bits depend only on that token, for any number of
tokens in the step. For the 16-bit types that holds among steps with the same tile (see `triton_linear_plan`). Weights
never depend on earlier kernels: they are loaded, or prefetched into L2, before the kernel waits for its input.

Launches with split tiles share one scratch memory per device, so they must be on one stream at a time. The memory is
allocated at the first use, or in advance by `reserve_scratch`, but never while a CUDA graph is captured.
"""

from functools import lru_cache

import torch
from torch import Tensor

from tandem.engine.kernels.layers import Linear, Norm
from tandem.engine.kernels.linear.triton_linear_kernels import (
    ADD,
    GATE_UP,
    NO_NORM,
    NORM_FIRST,
    NORM_LAST,
    PREFETCH_BYTES,
    STORE,
    gemv_kernel,
    skinny_kernel,
)
from tandem.engine.kernels.linear.triton_linear_plan import (
    SCRATCH_COUNTERS,
    SCRATCH_FLOATS,
    fits_scratch,
    streams,
    tile_for,
)
from tandem.engine.kernels.linear.triton_linear_tiles import Gemv, Skinny, Tile

__all__ = [
    "ADD",
    "GATE_UP",
    "STORE",
    "launch",
    "linear_add",
    "norm_gate_up",
    "norm_linear",
    "reserve_scratch",
    "streams",
]

_VECTOR_BYTES = 16
"""Number of bytes of a thread's load, and the alignment of rows that is required to prefetch them into L2."""


def norm_linear(hidden: Tensor, norm: Norm | None, linear: Linear, *, pdl: bool) -> Tensor:
    """Return RMSNorm(hidden) · weightᵀ + bias: hidden [T, K], norm [K], weight [N, K], bias [N] → [T, N].

    Without `norm` it is the plain product. All tensors have one dtype, bfloat16, float16 or float32, except that the
    norm may be float32 with 16-bit tensors. The result is rounded once, at the end.
    """
    out = hidden.new_empty(hidden.shape[0], len(linear.matrix))
    launch(hidden, norm, linear, out, STORE.value, pdl=pdl)
    return out


def norm_gate_up(hidden: Tensor, norm: Norm | None, gate_up: Linear, *, pdl: bool, activation: str = "silu") -> Tensor:
    """Return activation(g) · u with [g | u] = RMSNorm(hidden) · weightᵀ + bias → [T, I].

    The weight is [2·I, K] with the gate rows first; `activation` is one of `DenseFeedForward.activation`.
    """
    out = hidden.new_empty(hidden.shape[0], len(gate_up.matrix) // 2)
    launch(hidden, norm, gate_up, out, GATE_UP.value, pdl=pdl, gelu=activation == "gelu_tanh")
    return out


def linear_add(x: Tensor, linear: Linear, hidden: Tensor, *, pdl: bool) -> None:
    """Add x · weightᵀ + bias to hidden in place: x [T, K], weight [N, K], bias [N], hidden [T, N]."""
    launch(x, None, linear, hidden, ADD.value, pdl=pdl)


def launch(
    x: Tensor,
    norm: Norm | None,
    linear: Linear,
    out: Tensor,
    op: int,
    *,
    pdl: bool,
    tile: Tile | None = None,
    gelu: bool = False,
) -> None:
    """Launch one product into `out`, for `op` STORE, GATE_UP or ADD; `tile` None = that of `tile_for`.

    GATE_UP applies SiLU, or GELU if `gelu`. Raises ValueError if the partial sums of a split tile do not fit the
    scratch memory.
    """
    (tokens, k), weight, bias = x.shape, linear.matrix, linear.bias
    paired = op == GATE_UP.value
    if tile is None:
        tile = tile_for(tokens, weight.shape[0], k, paired, x.element_size())
    when = NO_NORM.value if norm is None else NORM_LAST.value
    vector = min(_VECTOR_BYTES // x.element_size(), tile.columns)
    n = out.shape[1]
    shared = {"num_warps": tile.warps, "launch_pdl": pdl}
    # Tensors that a variant does not read still need an address: that of x is used.
    norm_or_any, eps = (x, 0.0) if norm is None else (norm.weight, norm.eps)
    bias_or_any = x if bias is None else bias
    if isinstance(tile, Gemv):
        gemv_kernel[(-(-n // tile.rows),)](
            x, norm_or_any, weight, bias_or_any, out, n, eps,
            K=k, OP=op, GELU=gelu, NORM=when, BIAS=bias is not None, ROWS=tile.rows, COLUMNS=tile.columns,
            VECTOR=vector, PDL=pdl, **shared,
        )  # fmt: skip
        return
    if when and x.dtype == torch.float16:
        when = NORM_FIRST.value
    grid = (-(-n // tile.rows), -(-tokens // tile.tokens), tile.splits)
    if not fits_scratch(tile, grid[0] * grid[1], paired):
        raise ValueError(
            f"{tile} splits a product of {tokens} tokens and {n} outputs into more parts than scratch holds"
        )
    partials, counters = (out, out) if tile.splits == 1 else reserve_scratch(x.device)
    skinny_kernel[grid](
        x, norm_or_any, weight, bias_or_any, out, partials, counters, tokens, n, eps,
        K=k, OP=op, GELU=gelu, NORM=when, BIAS=bias is not None, ROWS=tile.rows, TOKENS=tile.tokens,
        COLUMNS=tile.columns, SPLITS=tile.splits, VECTOR=vector, EARLY=early_bytes(weight, tile) if pdl else 0,
        PDL=pdl, num_stages=tile.stages, **shared,
    )  # fmt: skip


def early_bytes(weight: Tensor, tile: Skinny) -> int:
    """Return the number of bytes of each weight row to prefetch into L2; 0 if rows are too short or not aligned."""
    row_bytes = weight.shape[1] * weight.element_size()
    aligned = row_bytes % _VECTOR_BYTES == 0 and weight.data_ptr() % _VECTOR_BYTES == 0
    return tile.early if aligned and row_bytes >= PREFETCH_BYTES.value else 0


@lru_cache(maxsize=8)
def reserve_scratch(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the partial sums and counters of split products on `device`, which exist until the process ends.

    Raises RuntimeError while a CUDA graph is being captured, because the memory must outlive the graph.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("reserve_scratch must run once before a CUDA graph is captured")
    partials = torch.empty(SCRATCH_FLOATS, dtype=torch.float32, device=device)
    return partials, torch.zeros(SCRATCH_COUNTERS, dtype=torch.int32, device=device)
