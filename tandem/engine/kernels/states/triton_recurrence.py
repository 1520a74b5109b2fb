"""The recurrences of state layers in Triton, with the convolution before them: delta rules and Mamba-2.

One program computes some values of one head of a row: it reads their state [K, V] in float32 once, advances it token by
token, and writes it once. `finish` then normalizes the output, and keeps the last inputs of the convolution, which all
programs of a row have read by then. See `recurrence.py` for the formulas.
"""

import triton
import triton.language as tl
from torch import Tensor

from tandem.engine.config.state_layers import GatedDeltaNet, KimiDeltaAttention, Mamba2, ShortConvolution
from tandem.engine.kernels.base import StepLayout
from tandem.engine.kernels.kv_cache import StateCache
from tandem.engine.kernels.layers import RecurrentLayer
from tandem.engine.kernels.states.projections import RowSpan, projections_of
from tandem.engine.kernels.triton_launch import launch_dependents, wait_for_inputs

_FEW_ROWS = 4


def _tile(rows: int) -> tuple[int, int]:
    """Return the maximum number of values of a program, and its warps.

    One row of Gated DeltaNet with Qwen3-Next's sizes takes 6.2 us on an H200 with 32 values and 4 warps, 8.1 us with 64
    values and 2 warps. For 128 rows these reach 85 % of the copy bandwidth, 64 values and 4 warps 80 %, and 32 values
    at most 76 % (`python -m benchmarks.kernels state --tiles`).
    """
    return (32, 4) if rows <= _FEW_ROWS else (64, 2)


def recur(
    projected: Tensor, layer: RecurrentLayer, cache: StateCache, layout: StepLayout, span: RowSpan, out: Tensor,
    *, pdl: bool, tile: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """Compute the outputs of the rows of `span` before gate and norm, and write their states.

    projected [T, sum(projected)] and out [T, inner] are contiguous. `tile` replaces that of
    `_tile`. Nothing is written for padding rows.
    """
    spec, places, states, inputs = layer.spec, projections_of(layer.spec), cache.states, cache.inputs
    assert not isinstance(spec, ShortConvolution)
    assert states is not None
    assert layer.decay_log is not None
    delta = not isinstance(spec, Mamba2)
    shared, key_dim, value_dim = spec.state.state
    first, second, _ = places.parts
    # The first channels of queries, keys and values among all channels, and among those of a head.
    at = (0, first, first + second) if delta else (first + second, first, 0)
    values, warps = tile or _tile(span.rows)
    block = min(triton.next_power_of_2(value_dim), values)
    heads = spec.state.heads
    _recur[(span.rows, heads * shared, triton.cdiv(value_dim, block))](
        projected,
        layer.convolution,
        layer.convolution if layer.convolution_bias is None else layer.convolution_bias,
        layer.decay_log,
        layer.step_bias,
        layer.decay_log if layer.skip is None else layer.skip,
        states[:, layer.index],
        inputs[:, layer.index],
        layout.state_pages,
        layout.row_starts,
        out,
        projected.stride(0),
        states.stride(0),
        states.stride(2),
        inputs.stride(0),
        inputs.stride(2),
        span.first,
        spec.step_scale if isinstance(spec, GatedDeltaNet) else 1.0,
        key_dim**-0.5 if delta else 1.0,
        spec.least_step if isinstance(spec, Mamba2) else 0.0,
        HEADS=heads,
        SHARED=shared,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        QUERY_AT=at[0],
        KEY_AT=at[1],
        VALUE_AT=at[2],
        CONVOLVED=places.convolved,
        STEP=places.step,
        DECAY=places.decay,
        WIDTH=spec.width,
        BIASED=layer.convolution_bias is not None,
        DELTA=delta,
        CHANNEL_DECAYS=isinstance(spec, KimiDeltaAttention),
        SINGLE=span.tokens == 1,
        BLOCK_K=triton.next_power_of_2(key_dim),
        BLOCK_V=block,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=warps,
    )


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)); above 20 that is x in float32."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(x)))


@triton.jit
def _mixed(
    x_ptr,
    row_stride,
    weight_ptr,
    bias_ptr,
    inputs_ptr,
    channel,
    local,
    token,
    start,
    fresh,
    mask,
    WIDTH: tl.constexpr,
    BIASED: tl.constexpr,
    SINGLE: tl.constexpr,
):
    """Return silu of the convolution of some channels at a token of a row that begins at token `start`.

    `x_ptr` is the first channel of token 0, and `inputs_ptr` the kept inputs of the channels' head.
    """
    KEPT: tl.constexpr = WIDTH - 1
    x = tl.load(x_ptr + token * row_stride + channel, mask=mask, other=0.0).to(tl.float32)
    total = x * tl.load(weight_ptr + channel * WIDTH + KEPT, mask=mask, other=0.0).to(tl.float32)
    if BIASED:
        total += tl.load(bias_ptr + channel, mask=mask, other=0.0).to(tl.float32)
    for back in tl.static_range(1, WIDTH):
        before = token - back
        kept = inputs_ptr + local * KEPT + KEPT - start + before
        x = tl.load(kept, mask=mask & (before < start) & (fresh == 0), other=0.0).to(tl.float32)
        if not SINGLE:
            at = before * row_stride + channel
            x += tl.load(x_ptr + at, mask=mask & (before >= start), other=0.0).to(tl.float32)
        total += x * tl.load(weight_ptr + channel * WIDTH + (KEPT - back), mask=mask, other=0.0).to(tl.float32)
    return total * tl.sigmoid(total)


@triton.jit(do_not_specialize=["first_row"])
def _recur(
    projected_ptr,
    weight_ptr,
    bias_ptr,
    decay_ptr,
    step_bias_ptr,
    skip_ptr,
    states_ptr,
    inputs_ptr,
    pages_ptr,
    starts_ptr,
    out_ptr,
    row_stride,
    state_page,
    state_head,
    input_page,
    input_head,
    first_row,
    step_scale,
    scale,
    least_step,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    QUERY_AT: tl.constexpr,
    KEY_AT: tl.constexpr,
    VALUE_AT: tl.constexpr,
    CONVOLVED: tl.constexpr,
    STEP: tl.constexpr,
    DECAY: tl.constexpr,
    WIDTH: tl.constexpr,
    BIASED: tl.constexpr,
    DELTA: tl.constexpr,
    CHANNEL_DECAYS: tl.constexpr,
    SINGLE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row, head of values, block) computes a block of the head's values for all tokens of the row."""
    launch_dependents(PDL)
    row, head = tl.program_id(0) + first_row, tl.program_id(1)
    group, member = head // SHARED, head % SHARED
    key = tl.arange(0, BLOCK_K)
    value = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    key_inside, inside = key < KEY_DIM, value < VALUE_DIM
    row_stride = tl.cast(row_stride, tl.int64)
    rate = -tl.exp(tl.load(decay_ptr + head))
    # A head has one dt, or one for each key channel.
    own_dt, has_dt = head, True
    if CHANNEL_DECAYS:
        own_dt, has_dt = head * KEY_DIM + key, key_inside
    step_bias = tl.load(step_bias_ptr + own_dt, mask=has_dt, other=0.0)
    wait_for_inputs(PDL)
    read = tl.load(pages_ptr + 2 * row).to(tl.int64)
    write = tl.load(pages_ptr + 2 * row + 1).to(tl.int64)
    if write < 0:
        return
    fresh = (read < 0).to(tl.int32)
    read = tl.maximum(read, 0)
    # The state is loaded first, because nothing takes as long.
    place = group * state_head + member * KEY_DIM * VALUE_DIM + key[:, None] * VALUE_DIM + value[None, :]
    held = key_inside[:, None] & inside[None, :]
    state = tl.load(states_ptr + read * state_page + place, mask=held & (fresh == 0), other=0.0)
    start = row
    end = row + 1
    if not SINGLE:
        start = tl.load(starts_ptr + row)
        end = tl.load(starts_ptr + row + 1)
    inputs = inputs_ptr + read * input_page + group * input_head
    x_ptr = projected_ptr + CONVOLVED
    query = HEADS * QUERY_AT + group * KEY_DIM + key
    keys = HEADS * KEY_AT + group * KEY_DIM + key
    own = HEADS * VALUE_AT + head * VALUE_DIM + value
    local = VALUE_AT + member * VALUE_DIM + value
    for token in range(start, end):
        q = _mixed(
            x_ptr, row_stride, weight_ptr, bias_ptr, inputs, query, QUERY_AT + key, token, start, fresh, key_inside,
            WIDTH, BIASED, SINGLE,
        )  # fmt: skip
        k = _mixed(
            x_ptr, row_stride, weight_ptr, bias_ptr, inputs, keys, KEY_AT + key, token, start, fresh, key_inside,
            WIDTH, BIASED, SINGLE,
        )  # fmt: skip
        v = _mixed(
            x_ptr, row_stride, weight_ptr, bias_ptr, inputs, own, local, token, start, fresh, inside,
            WIDTH, BIASED, SINGLE,
        )  # fmt: skip
        projected = projected_ptr + token * row_stride
        dt = tl.load(projected + DECAY + own_dt, mask=has_dt, other=0.0).to(tl.float32) + step_bias
        dt = tl.maximum(softplus(dt), least_step)
        decay = tl.exp(rate * dt)
        if CHANNEL_DECAYS:
            decay = decay[:, None]
        state *= decay
        if DELTA:
            q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * scale
            k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
            step = step_scale * tl.sigmoid(tl.load(projected + STEP + head).to(tl.float32))
            state += k[:, None] * (step * (v - tl.sum(state * k[:, None], 0)))[None, :]
            mixed = tl.sum(state * q[:, None], 0)
        else:
            state += k[:, None] * (dt * v)[None, :]
            mixed = tl.sum(state * q[:, None], 0) + tl.load(skip_ptr + head) * v
        at = token * tl.full((), HEADS * SHARED * VALUE_DIM, tl.int64) + head * VALUE_DIM + value
        tl.store(out_ptr + at, mixed.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(states_ptr + write * state_page + place, state, mask=held)
