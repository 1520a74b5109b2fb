"""Gated DeltaNet of one-token rows on GPUs: convolution, recurrence and gated norm in one launch.

One program computes one value head of one row. It reads the head's state [K, V] in float32 once and writes it once, in
tiles of all keys by `BLOCK_V` values. The convolution's inputs of a key head belong to several value heads, so a second
launch stores the new ones after all programs have read the old ones.
"""

import triton
import triton.language as tl
from torch import Tensor

from tandem.engine.config.model import GatedDeltaNet
from tandem.engine.kernels.kv_cache import StateCache
from tandem.engine.kernels.layers import RecurrentLayer
from tandem.engine.kernels.triton_launch import launch_dependents, wait_for_inputs

_TILE = 32
"""The maximum number of values of a tile of the state."""
_INPUT_BLOCK = 256


def decode_delta(
    projected: Tensor, layer: RecurrentLayer, cache: StateCache, state_pages: Tensor, out: Tensor, *, pdl: bool
) -> None:
    """Compute Gated DeltaNet for rows of one token, and write their states.

    projected [B, sum(projected)] and out [B, inner] are contiguous; state_pages [B, 2] int32 as in `StepLayout`.
    Padding rows, which have no page to write to, get an undefined output.
    """
    spec = layer.spec
    assert isinstance(spec, GatedDeltaNet)
    assert cache.states is not None
    assert layer.decay_log is not None
    assert layer.step_bias is not None
    assert layer.norm is not None
    rows = len(projected)
    states, inputs = cache.states, cache.inputs
    values = triton.next_power_of_2(spec.value_dim)
    _delta[(rows, spec.value_heads)](
        projected,
        layer.convolution,
        layer.decay_log,
        layer.step_bias,
        layer.norm.weight,
        states[:, layer.index],
        inputs[:, layer.index],
        state_pages,
        out,
        projected.stride(0),
        states.stride(0),
        states.stride(2),
        inputs.stride(0),
        inputs.stride(2),
        layer.norm.eps,
        spec.step_scale,
        spec.key_dim**-0.5,
        KEY_HEADS=spec.key_heads,
        VALUE_HEADS=spec.value_heads,
        KEY_DIM=spec.key_dim,
        VALUE_DIM=spec.value_dim,
        WIDTH=spec.width,
        BLOCK_K=triton.next_power_of_2(spec.key_dim),
        BLOCK_V=min(values, _TILE),
        VALUES=values,
        PDL=pdl,
        launch_pdl=pdl,
    )
    channels = spec.state.channels
    _keep_inputs[(rows, spec.key_heads, triton.cdiv(channels, _INPUT_BLOCK))](
        projected,
        inputs[:, layer.index],
        state_pages,
        projected.stride(0),
        inputs.stride(0),
        inputs.stride(2),
        KEY_HEADS=spec.key_heads,
        KEY_DIM=spec.key_dim,
        SHARED=spec.value_heads // spec.key_heads * spec.value_dim,
        KEPT=spec.width - 1,
        BLOCK=_INPUT_BLOCK,
        PDL=pdl,
        launch_pdl=pdl,
    )


@triton.jit
def _mixed(projected, convolution, inputs, channel, local, fresh, mask, WIDTH: tl.constexpr):
    """Return silu of the convolution of some channels, whose numbers are `channel`, and `local` in their key head.

    The pointers are those of the row's projections, of the weight, and of the kept inputs of the key head.
    """
    x = tl.load(projected + channel, mask=mask, other=0.0).to(tl.float32)
    weight = convolution + channel * WIDTH
    total = x * tl.load(weight + (WIDTH - 1), mask=mask, other=0.0).to(tl.float32)
    for back in tl.static_range(WIDTH - 1):
        kept = tl.load(inputs + local * (WIDTH - 1) + back, mask=mask & (fresh == 0), other=0.0).to(tl.float32)
        total += kept * tl.load(weight + back, mask=mask, other=0.0).to(tl.float32)
    return total * tl.sigmoid(total)


@triton.jit
def _delta(
    projected_ptr,
    convolution_ptr,
    decay_ptr,
    bias_ptr,
    norm_ptr,
    states_ptr,
    inputs_ptr,
    pages_ptr,
    out_ptr,
    row_stride,
    state_page,
    state_head,
    input_page,
    input_head,
    eps,
    step_scale,
    scale,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    VALUES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row, head) computes one value head of a row of one token."""
    launch_dependents(PDL)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    SHARED: tl.constexpr = VALUE_HEADS // KEY_HEADS
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    INNER: tl.constexpr = VALUE_HEADS * VALUE_DIM
    key_head, member = head // SHARED, head % SHARED
    wait_for_inputs(PDL)
    read = tl.load(pages_ptr + 2 * row).to(tl.int64)
    write = tl.load(pages_ptr + 2 * row + 1).to(tl.int64)
    if write < 0:
        return
    fresh = (read < 0).to(tl.int32)
    read = tl.maximum(read, 0)
    projected = projected_ptr + row * row_stride
    inputs = inputs_ptr + read * input_page + key_head * input_head
    key = tl.arange(0, BLOCK_K)
    key_inside = key < KEY_DIM
    first = key_head * KEY_DIM
    q = _mixed(projected, convolution_ptr, inputs, first + key, key, fresh, key_inside, WIDTH)
    k = _mixed(projected, convolution_ptr, inputs, KEYS + first + key, KEY_DIM + key, fresh, key_inside, WIDTH)
    q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * scale
    k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
    gates = projected + 2 * KEYS + 2 * INNER
    step = step_scale * tl.sigmoid(tl.load(gates + head).to(tl.float32))
    dt = tl.load(gates + VALUE_HEADS + head).to(tl.float32) + tl.load(bias_ptr + head)
    softplus = tl.where(dt > 20.0, dt, tl.log(1.0 + tl.exp(dt)))
    decay = tl.exp(-tl.exp(tl.load(decay_ptr + head)) * softplus)
    STATE: tl.constexpr = KEY_DIM * VALUE_DIM
    old = states_ptr + read * state_page + key_head * state_head + member * STATE
    new = states_ptr + write * state_page + key_head * state_head + member * STATE
    out = out_ptr + row * INNER + head * VALUE_DIM
    squares = 0.0
    for start in tl.static_range(0, VALUES, BLOCK_V):
        value = start + tl.arange(0, BLOCK_V)
        inside = value < VALUE_DIM
        own = head * VALUE_DIM + value
        local = 2 * KEY_DIM + member * VALUE_DIM + value
        v = _mixed(projected, convolution_ptr, inputs, 2 * KEYS + own, local, fresh, inside, WIDTH)
        place = key[:, None] * VALUE_DIM + value[None, :]
        held = key_inside[:, None] & inside[None, :]
        state = decay * tl.load(old + place, mask=held & (fresh == 0), other=0.0)
        added = step * (v - tl.sum(state * k[:, None], 0))
        state += k[:, None] * added[None, :]
        tl.store(new + place, state, mask=held)
        # As in the reference, the output is rounded to the model's dtype before the norm.
        mixed = tl.sum(state * q[:, None], 0).to(out_ptr.dtype.element_ty)
        tl.store(out + value, mixed, mask=inside)
        wide = mixed.to(tl.float32)
        squares += tl.sum(wide * wide, 0)
    tl.debug_barrier()
    root = tl.rsqrt(squares / VALUE_DIM + eps)
    value = tl.arange(0, VALUES)
    inside = value < VALUE_DIM
    x = tl.load(out + value, mask=inside, other=0.0).to(tl.float32) * root
    x *= tl.load(norm_ptr + value, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(projected + 2 * KEYS + INNER + head * VALUE_DIM + value, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + value, (x * gate * tl.sigmoid(gate)).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _keep_inputs(
    projected_ptr,
    inputs_ptr,
    pages_ptr,
    row_stride,
    input_page,
    input_head,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    SHARED: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row, key head, block) stores the latest inputs of some channels of a key head."""
    launch_dependents(PDL)
    wait_for_inputs(PDL)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    read = tl.load(pages_ptr + 2 * row).to(tl.int64)
    write = tl.load(pages_ptr + 2 * row + 1).to(tl.int64)
    local = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = (local < 2 * KEY_DIM + SHARED) & (write >= 0)
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    in_value = 2 * KEYS + head * SHARED + local - 2 * KEY_DIM
    in_key = (local // KEY_DIM) * KEYS + head * KEY_DIM + local % KEY_DIM
    channel = tl.where(local < 2 * KEY_DIM, in_key, in_value)
    old = inputs_ptr + tl.maximum(read, 0) * input_page + head * input_head + local * KEPT
    new = inputs_ptr + write * input_page + head * input_head + local * KEPT
    for back in tl.static_range(KEPT - 1):
        kept = tl.load(old + back + 1, mask=inside & (read >= 0), other=0.0)
        tl.store(new + back, kept, mask=inside)
    x = tl.load(projected_ptr + row * row_stride + channel, mask=inside, other=0.0)
    tl.store(new + KEPT - 1, x.to(inputs_ptr.dtype.element_ty), mask=inside)
