"""The short causal convolution of state layers in Triton, for rows of any length.

The first inputs of a row are convolved with the inputs that its state page keeps, and its last inputs are kept in the
page that it writes. The kept inputs of a head of the state are [channels, width - 1], the oldest first.
"""

import triton
import triton.language as tl
from torch import Tensor

from tandem.engine.config.state_layers import ShortConvolution
from tandem.engine.kernels.base import StepLayout
from tandem.engine.kernels.kv_cache import StateCache
from tandem.engine.kernels.layers import RecurrentLayer
from tandem.engine.kernels.states.projections import RowSpan, projections_of
from tandem.engine.kernels.triton_launch import launch_dependents, wait_for_inputs

_TOKENS = 32
"""The number of tokens of a tile in rows of several tokens; never less than the inputs that a convolution keeps."""
_CHANNELS = 256
"""The maximum number of channels of a tile of one token; tiles of more tokens have fewer channels."""


def convolve(
    projected: Tensor, layer: RecurrentLayer, cache: StateCache, layout: StepLayout, span: RowSpan, out: Tensor,
    *, pdl: bool,
) -> None:  # fmt: skip
    """Compute the convolution of the rows of `span`, and keep their last inputs.

    projected [T, sum(projected)] is contiguous. For a `ShortConvolution`, out [T, channels] becomes the layer's output,
    with zeros for padding rows. For other layers, out [T - span.first, channels of all heads], contiguous, becomes silu
    of the convolution: one contiguous tensor [T - span.first, channels] for each part of `spec.convolved`.
    """
    spec, places = layer.spec, projections_of(layer.spec)
    shape, gated = spec.state, isinstance(spec, ShortConvolution)
    tokens = 1 if span.tokens == 1 else triton.next_power_of_2(max(_TOKENS, shape.inputs))
    block = min(triton.next_power_of_2(shape.channels), _CHANNELS if tokens == 1 else _CHANNELS // 4)
    blocks = triton.cdiv(shape.channels, block)
    inputs = cache.inputs
    _convolve[(span.rows, shape.heads * blocks, triton.cdiv(span.tokens, tokens))](
        projected,
        layer.convolution,
        layer.convolution if layer.convolution_bias is None else layer.convolution_bias,
        inputs[:, layer.index],
        layout.state_pages,
        layout.row_starts,
        out,
        projected.stride(0),
        inputs.stride(0),
        inputs.stride(2),
        span.first,
        len(projected) - span.first,
        PARTS=places.parts,
        HEADS=shape.heads,
        AT=places.convolved,
        GATE=places.gate,
        X=sum(spec.projected[:2]),
        WIDTH=shape.inputs + 1,
        BIASED=layer.convolution_bias is not None,
        GATED=gated,
        SINGLE=span.tokens == 1,
        TOKENS=tokens,
        BLOCK=block,
        PDL=pdl,
        launch_pdl=pdl,
    )


@triton.jit
def channel_of(local, head, HEADS: tl.constexpr, PARTS: tl.constexpr):
    """Return the channels of the whole convolution with the numbers `local` among the channels of a head."""
    FIRST: tl.constexpr = PARTS[0]
    SECOND: tl.constexpr = PARTS[1]
    THIRD: tl.constexpr = PARTS[2]
    channel = head * FIRST + local
    if SECOND > 0:
        channel = tl.where(local < FIRST, channel, HEADS * FIRST + head * SECOND + local - FIRST)
    if THIRD > 0:
        last = HEADS * (FIRST + SECOND) + head * THIRD + local - FIRST - SECOND
        channel = tl.where(local < FIRST + SECOND, channel, last)
    return channel


@triton.jit
def keep_inputs(
    x_ptr,
    scale_ptr,
    row_stride,
    old_ptr,
    new_ptr,
    channel,
    local,
    start,
    end,
    fresh,
    mask,
    WIDTH: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Store the last WIDTH - 1 inputs of some channels of a row, which may be older than the row's first token.

    The inputs are the elements of `x_ptr`, multiplied by those of `scale_ptr` if SCALED. `old_ptr` and `new_ptr` are
    the kept inputs of the channels' head, and may be equal.
    """
    KEPT: tl.constexpr = WIDTH - 1
    for slot in tl.static_range(KEPT):
        token = end - KEPT + slot
        older = token < start
        at = token.to(tl.int64) * row_stride + channel
        x = tl.load(x_ptr + at, mask=mask & (older == 0), other=0.0)
        if SCALED:
            scale = tl.load(scale_ptr + at, mask=mask & (older == 0), other=0.0)
            x = (x.to(tl.float32) * scale.to(tl.float32)).to(x.dtype)
        # The slot that is read comes after those written so far.
        old = tl.load(old_ptr + local * KEPT + KEPT - start + token, mask=mask & older & (fresh == 0), other=0.0)
        tl.store(new_ptr + local * KEPT + slot, tl.where(older, old, x.to(old.dtype)), mask=mask)


@triton.jit(do_not_specialize=["first_row", "tokens"])
def _convolve(
    projected_ptr,
    weight_ptr,
    bias_ptr,
    inputs_ptr,
    pages_ptr,
    starts_ptr,
    out_ptr,
    row_stride,
    input_page,
    input_head,
    first_row,
    tokens,
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    AT: tl.constexpr,
    GATE: tl.constexpr,
    X: tl.constexpr,
    WIDTH: tl.constexpr,
    BIASED: tl.constexpr,
    GATED: tl.constexpr,
    SINGLE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row, head and block of channels, tile) computes some channels of a tile of a row's tokens."""
    launch_dependents(PDL)
    row = tl.program_id(0) + first_row
    FIRST: tl.constexpr = PARTS[0]
    SECOND: tl.constexpr = PARTS[1]
    THIRD: tl.constexpr = PARTS[2]
    CHANNELS: tl.constexpr = FIRST + SECOND + THIRD
    BLOCKS: tl.constexpr = (CHANNELS + BLOCK - 1) // BLOCK
    KEPT: tl.constexpr = WIDTH - 1
    head = tl.program_id(1) // BLOCKS
    local = tl.program_id(1) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    inside = local < CHANNELS
    channel = channel_of(local, head, HEADS, PARTS)
    wait_for_inputs(PDL)
    start = row
    end = row + 1
    if not SINGLE:
        start = tl.load(starts_ptr + row)
        end = tl.load(starts_ptr + row + 1)
    tile = start + tl.program_id(2) * TOKENS
    if tile >= end:
        return
    read = tl.load(pages_ptr + 2 * row).to(tl.int64)
    write = tl.load(pages_ptr + 2 * row + 1).to(tl.int64)
    fresh = (read < 0).to(tl.int32)
    old = inputs_ptr + tl.maximum(read, 0) * input_page + head * input_head
    new = inputs_ptr + tl.maximum(write, 0) * input_page + head * input_head
    token = tile + tl.arange(0, TOKENS)
    valid = (token < end)[:, None] & inside[None, :] & (write >= 0)
    x_ptr = projected_ptr + AT
    if GATED:
        x_ptr = projected_ptr + X
    total = tl.zeros((TOKENS, BLOCK), tl.float32)
    if BIASED:
        total += tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
    for back in tl.static_range(WIDTH):
        before = token - back
        at = before.to(tl.int64)[:, None] * row_stride + channel[None, :]
        here = valid & (before >= start)[:, None]
        x = tl.load(x_ptr + at, mask=here, other=0.0)
        if GATED:
            scale = tl.load(projected_ptr + at, mask=here, other=0.0)
            x = (x.to(tl.float32) * scale.to(tl.float32)).to(x.dtype)
        if back > 0:
            slot = local[None, :] * KEPT + (KEPT - start + before)[:, None]
            x += tl.load(old + slot, mask=valid & (before < start)[:, None] & (fresh == 0), other=0.0)
        weight = tl.load(weight_ptr + channel * WIDTH + (KEPT - back), mask=inside, other=0.0)
        total += x.to(tl.float32) * weight.to(tl.float32)[None, :]
    stored = (token < end)[:, None] & inside[None, :]
    if GATED:
        at = token.to(tl.int64)[:, None] * row_stride + channel[None, :]
        gate = tl.load(projected_ptr + GATE + at, mask=valid, other=0.0).to(tl.float32)
        place = token.to(tl.int64)[:, None] * (HEADS * CHANNELS) + channel[None, :]
        tl.store(out_ptr + place, tl.where(valid, gate * total, 0.0).to(out_ptr.dtype.element_ty), mask=stored)
    else:
        # The tensors of the parts follow one another; all rows before these have one token.
        later, last = local >= FIRST, local >= FIRST + SECOND
        part_width = HEADS * tl.where(last, THIRD, tl.where(later, SECOND, FIRST))
        part_start = HEADS * tl.where(last, FIRST + SECOND, tl.where(later, FIRST, 0))
        place = part_start.to(tl.int64) * tokens + channel - part_start
        place = place[None, :] + (token - first_row).to(tl.int64)[:, None] * part_width[None, :]
        tl.store(out_ptr + place, (total * tl.sigmoid(total)).to(out_ptr.dtype.element_ty), mask=stored)
    if tl.program_id(2) == 0:
        # Other threads may still read the inputs that are replaced here.
        tl.debug_barrier()
        keep_inputs(
            x_ptr,
            projected_ptr,
            row_stride,
            old,
            new,
            channel,
            local,
            start,
            end,
            fresh,
            inside & (write >= 0),
            WIDTH,
            GATED,
        )
