"""The gated norm of the output of state layers in Triton, and the last inputs of their convolution."""

import triton
import triton.language as tl
from torch import Tensor

from tandem.engine.config.state_layers import KimiDeltaAttention, Mamba2, ShortConvolution
from tandem.engine.kernels.base import StepLayout
from tandem.engine.kernels.kv_cache import StateCache
from tandem.engine.kernels.layers import RecurrentLayer
from tandem.engine.kernels.states.projections import RowSpan, projections_of
from tandem.engine.kernels.states.triton_convolution import channel_of, keep_inputs
from tandem.engine.kernels.triton_launch import launch_dependents, wait_for_inputs

_CHANNELS = 512
"""The maximum number of channels whose inputs a program keeps."""
_TILE = 2048
"""The maximum number of elements that a program normalizes, unless one part has more."""


def finish(
    projected: Tensor, layer: RecurrentLayer, cache: StateCache, layout: StepLayout, span: RowSpan, mixed: Tensor,
    out: Tensor, *, keeps: bool, pdl: bool,
) -> None:  # fmt: skip
    """Gate and normalize the outputs of the rows of `span`, and if `keeps`, keep the last inputs of the convolution.

    projected [T, sum(projected)] and out [T, inner] are contiguous. mixed [T - span.first, inner], contiguous, has the
    outputs of the recurrence of the rows of `span`; it may be a part of `out`. Padding rows become 0.
    """
    spec, places, shape = layer.spec, projections_of(layer.spec), layer.spec.state
    assert not isinstance(spec, ShortConvolution)
    assert layer.norm is not None
    # Mamba-2 applies the gate before the norm, delta rules after it.
    gate_first = isinstance(spec, Mamba2)
    parts = spec.norm_groups if isinstance(spec, Mamba2) else shape.heads * shape.state[0]
    part = spec.inner // parts
    block_n = triton.next_power_of_2(part)
    fitting = max(1, _TILE // block_n)
    # A program normalizes several parts of one token, or one part of several tokens.
    tokens, joined = (1, min(fitting, triton.next_power_of_2(parts))) if span.tokens == 1 else (fitting, 1)
    block = min(triton.next_power_of_2(shape.channels), _CHANNELS)
    jobs = triton.cdiv(parts, joined) + (shape.heads * triton.cdiv(shape.channels, block) if keeps else 0)
    inputs = cache.inputs
    _finish[(span.rows, jobs, triton.cdiv(span.tokens, tokens))](
        projected,
        layer.norm.weight,
        inputs[:, layer.index],
        layout.state_pages,
        layout.row_starts,
        mixed,
        out,
        projected.stride(0),
        inputs.stride(0),
        inputs.stride(2),
        span.first,
        layer.norm.eps,
        PARTS=parts,
        PART=part,
        CHANNELS=places.parts,
        HEADS=shape.heads,
        CONVOLVED=places.convolved,
        GATE=places.gate,
        WIDTH=spec.width,
        GATE_FIRST=gate_first,
        SILU=not isinstance(spec, KimiDeltaAttention),
        SINGLE=span.tokens == 1,
        TOKENS=tokens,
        JOINED=joined,
        BLOCK_N=block_n,
        BLOCK=block,
        PDL=pdl,
        launch_pdl=pdl,
    )


@triton.jit(do_not_specialize=["first_row"])
def _finish(
    projected_ptr,
    norm_ptr,
    inputs_ptr,
    pages_ptr,
    starts_ptr,
    mixed_ptr,
    out_ptr,
    row_stride,
    input_page,
    input_head,
    first_row,
    eps,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    CHANNELS: tl.constexpr,
    HEADS: tl.constexpr,
    CONVOLVED: tl.constexpr,
    GATE: tl.constexpr,
    WIDTH: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    SILU: tl.constexpr,
    SINGLE: tl.constexpr,
    TOKENS: tl.constexpr,
    JOINED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row, job, tile) normalizes parts of a tile of tokens, or keeps inputs of some channels of the row."""
    launch_dependents(PDL)
    TOTAL: tl.constexpr = CHANNELS[0] + CHANNELS[1] + CHANNELS[2]
    JOBS: tl.constexpr = (PARTS + JOINED - 1) // JOINED
    BLOCKS: tl.constexpr = (TOTAL + BLOCK - 1) // BLOCK
    row, job = tl.program_id(0) + first_row, tl.program_id(1)
    wait_for_inputs(PDL)
    start = row
    end = row + 1
    if not SINGLE:
        start = tl.load(starts_ptr + row)
        end = tl.load(starts_ptr + row + 1)
    tile = start + tl.program_id(2) * TOKENS
    write = tl.load(pages_ptr + 2 * row + 1).to(tl.int64)
    if job < JOBS:
        # The lines of the tile are tokens, or parts of one token.
        line = tl.arange(0, TOKENS * JOINED)
        token, part = tile + line // JOINED, job * JOINED + line % JOINED
        column = tl.arange(0, BLOCK_N)
        inside = ((token < end) & (part < PARTS))[:, None] & (column < PART)[None, :]
        valid = inside & (write >= 0)
        own = (part * PART)[:, None] + column[None, :]
        at = token.to(tl.int64)[:, None] * (PARTS * PART) + own
        first = tl.cast(first_row, tl.int64) * (PARTS * PART)
        x = tl.load(mixed_ptr + at - first, mask=valid, other=0.0).to(tl.float32)
        gates = projected_ptr + GATE + token.to(tl.int64)[:, None] * row_stride + own
        gate = tl.load(gates, mask=valid, other=0.0).to(tl.float32)
        if SILU:
            gate *= tl.sigmoid(gate)
        else:
            gate = tl.sigmoid(gate)
        if GATE_FIRST:
            x *= gate
        x *= tl.rsqrt(tl.sum(x * x, 1) / PART + eps)[:, None]
        if GATE_FIRST:
            x *= tl.load(norm_ptr + own, mask=inside, other=0.0).to(tl.float32)
        else:
            x *= tl.load(norm_ptr + column, mask=column < PART, other=0.0).to(tl.float32)[None, :] * gate
        tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=inside)
    elif (tl.program_id(2) == 0) & (write >= 0):
        head = (job - JOBS) // BLOCKS
        local = (job - JOBS) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
        read = tl.load(pages_ptr + 2 * row).to(tl.int64)
        old = inputs_ptr + tl.maximum(read, 0) * input_page + head * input_head
        new = inputs_ptr + write * input_page + head * input_head
        channel = channel_of(local, head, HEADS, CHANNELS)
        x_ptr = projected_ptr + CONVOLVED
        fresh = (read < 0).to(tl.int32)
        keep_inputs(x_ptr, x_ptr, row_stride, old, new, channel, local, start, end, fresh, local < TOTAL, WIDTH, False)
