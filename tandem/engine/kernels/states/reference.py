"""State layers in plain PyTorch, the reference of all other implementations. The arithmetic is in float32 or wider."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.engine.config.state_layers import GatedDeltaNet, KimiDeltaAttention, Mamba2, ShortConvolution
from tandem.engine.kernels.base import Kernels, StepLayout
from tandem.engine.kernels.kv_cache import StateCache
from tandem.engine.kernels.layers import RecurrentLayer
from tandem.engine.kernels.states.recurrence import recurrence

_UNIT_EPS = 1e-6
"""The epsilon with which Gated DeltaNet normalizes queries and keys to unit length."""


class PlainStates(Kernels):
    """Kernels that compute state layers in plain PyTorch."""

    def mix_states(self, projected: Tensor, layer: RecurrentLayer, cache: StateCache, layout: StepLayout) -> Tensor:
        """Compute one-token rows together and longer rows one after the other."""
        return mix_states(projected, layer, cache, layout)


def mix_states(projected: Tensor, layer: RecurrentLayer, cache: StateCache, layout: StepLayout) -> Tensor:
    """Advance the states of the step's rows; see `Kernels.mix_states`."""
    assert layout.state_pages is not None
    out = projected.new_zeros(len(projected), layer.spec.inner)
    rows = len(layout.state_pages)
    # Steps of one-token rows do not wait for the device, so that CUDA graphs can contain them.
    bounds: Sequence[int] = range(rows + 1) if layout.decode_only else layout.row_starts.tolist()
    single = rows if layout.decode_only else layout.single_rows
    # The rows of one token are computed together, the others one after the other.
    spans = ([(0, single)] if single else []) + [(row, row + 1) for row in range(single, rows)]
    for first, last in spans:
        tokens = slice(bounds[first], bounds[last])
        if tokens.start == tokens.stop:
            continue
        part = torch.unflatten(projected[tokens], 0, (last - first, -1))
        out[tokens] = _rows(part, layer, cache, layout.state_pages[first:last].long()).flatten(0, 1)
    return out


def _rows(projected: Tensor, layer: RecurrentLayer, cache: StateCache, pages: Tensor) -> Tensor:
    """Return the output [B, L, inner] of B rows of L tokens, and write their states.

    The states of padding rows are written to page -1, the last one, which no request has.
    """
    spec, dtype = layer.spec, projected.dtype
    wide = torch.promote_types(dtype, torch.float32)
    read, write = pages.unbind(1)
    fresh = read < 0
    inputs = cache.inputs[read.clamp(min=0), layer.index].masked_fill(fresh[:, None, None, None], 0)
    parts = projected.split_with_sizes(spec.projected, -1)
    if isinstance(spec, ShortConvolution):
        before, after, x = parts
        mixed, inputs = _convolve(layer, inputs, [before * x])
        cache.inputs[write, layer.index] = inputs
        return (after.to(wide) * mixed[0].flatten(2)).to(dtype)
    assert cache.states is not None
    state = cache.states[read.clamp(min=0), layer.index].masked_fill(fresh[:, None, None, None, None], 0)
    if isinstance(spec, GatedDeltaNet | KimiDeltaAttention):
        q, k, v, gate, step, decay = parts
        mixed, inputs = _convolve(layer, inputs, [q, k, v])
        active = [F.silu(part) for part in mixed]
        if isinstance(spec, GatedDeltaNet):
            out, state = _delta_rule(layer, spec, active, step.to(wide), decay.to(wide), state)
        else:
            out, state = _channel_delta_rule(layer, active, step.to(wide), decay.to(wide), state)
    else:
        assert isinstance(spec, Mamba2)
        gate, x, b, c, dt = parts
        mixed, inputs = _convolve(layer, inputs, [x, b, c])
        out, state = _selective(layer, spec, [F.silu(part) for part in mixed], dt.to(wide), state)
    cache.inputs[write, layer.index] = inputs
    cache.states[write, layer.index] = state.to(cache.states.dtype)
    return _gated_norm(out, gate, layer, dtype)


def _convolve(layer: RecurrentLayer, inputs: Tensor, parts: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Return the convolution of each part [B, L, heads, channels per head] in float32, and the new kept inputs.

    inputs [B, heads, channels, width - 1]; parts [B, L, heads · channels per head].
    """
    sizes = layer.spec.convolved
    heads, kept = layer.spec.state.heads, layer.spec.state.inputs
    joined = _by_head(parts, heads).permute(0, 2, 3, 1)
    sequence = torch.cat([inputs, joined], -1)
    wide = torch.promote_types(sequence.dtype, torch.float32)
    weight = _by_head([part.T for part in _split(layer.convolution, sizes, heads)], heads).permute(1, 2, 0)
    mixed = (sequence.to(wide).unfold(-1, kept + 1, 1) * weight.unsqueeze(2).to(wide)).sum(-1)
    if layer.convolution_bias is not None:
        biases = [part.unsqueeze(0) for part in _split(layer.convolution_bias, sizes, heads)]
        mixed += _by_head(biases, heads)[0].unsqueeze(-1).to(wide)
    return list(mixed.permute(0, 3, 1, 2).split_with_sizes(sizes, -1)), sequence[..., sequence.shape[-1] - kept :]


def _split(weight: Tensor, sizes: tuple[int, ...], heads: int) -> tuple[Tensor, ...]:
    """Return the rows of each part of the convolution's weight or bias."""
    return weight.split_with_sizes([size * heads for size in sizes])


def _by_head(parts: list[Tensor], heads: int) -> Tensor:
    """Return the channels [..., heads, channels] of all parts [..., heads · channels of the part]."""
    return torch.cat([torch.unflatten(part, -1, (heads, -1)) for part in parts], -1)


def _delta_rule(
    layer: RecurrentLayer, spec: GatedDeltaNet, mixed: list[Tensor], step: Tensor, decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    q, k, v = mixed
    shared = spec.value_heads // spec.key_heads
    q, k = (_unit(part).repeat_interleave(shared, 2).transpose(1, 2) for part in (q, k))
    v = torch.unflatten(v, -1, (shared, spec.value_dim)).flatten(2, 3).transpose(1, 2)
    assert layer.decay_log is not None
    assert layer.step_bias is not None
    log_decay = -layer.decay_log.to(decay.dtype).exp() * F.softplus(decay + layer.step_bias)
    steps = spec.step_scale * step.sigmoid()
    initial = state.flatten(1, 2).to(v.dtype)
    decays = log_decay.transpose(1, 2).unsqueeze(-1)
    out, last = recurrence(q * spec.key_dim**-0.5, k, v, decays, steps.transpose(1, 2), initial)
    return out.transpose(1, 2), torch.unflatten(last, 1, (spec.key_heads, shared))


def _channel_delta_rule(
    layer: RecurrentLayer, mixed: list[Tensor], step: Tensor, decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the delta rule of Kimi Delta Attention; decay is [B, L, heads · head_dim]."""
    q, k, v = (part.transpose(1, 2) for part in mixed)
    assert layer.decay_log is not None
    assert layer.step_bias is not None
    rates = -layer.decay_log.to(decay.dtype).exp()[:, None]
    log_decay = rates * torch.unflatten(F.softplus(decay + layer.step_bias), -1, (len(rates), -1))
    initial, scale = state.flatten(1, 2).to(v.dtype), q.shape[-1] ** -0.5
    steps = step.sigmoid().transpose(1, 2)
    out, last = recurrence(_unit(q) * scale, _unit(k), v, log_decay.transpose(1, 2), steps, initial)
    return out.transpose(1, 2), last.unsqueeze(2)


def _selective(
    layer: RecurrentLayer, spec: Mamba2, mixed: list[Tensor], dt: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    x, b, c = mixed
    shared = spec.heads // spec.groups
    assert layer.decay_log is not None
    assert layer.step_bias is not None
    assert layer.skip is not None
    steps = F.softplus(dt + layer.step_bias).clamp(min=spec.least_step)
    log_decay = -layer.decay_log.to(dt.dtype).exp() * steps
    heads = torch.unflatten(x, -1, (shared, spec.head_dim)).flatten(2, 3)
    b, c = (part.repeat_interleave(shared, 2).transpose(1, 2) for part in (b, c))
    values = (heads * steps.unsqueeze(-1)).transpose(1, 2)
    initial = state.flatten(1, 2).to(x.dtype)
    out, last = recurrence(c, b, values, log_decay.transpose(1, 2).unsqueeze(-1), None, initial)
    return out.transpose(1, 2) + layer.skip[:, None] * heads, torch.unflatten(last, 1, (spec.groups, shared))


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _UNIT_EPS)


def _gated_norm(out: Tensor, gate: Tensor, layer: RecurrentLayer, dtype: torch.dtype) -> Tensor:
    """Return the gated and normalized output [B, L, inner] of the heads [B, L, heads, dim].

    Mamba-2 applies the gate before the norm, the others after it. The gate of Kimi Delta Attention is a sigmoid.
    """
    spec, wide = layer.spec, out.dtype
    assert layer.norm is not None
    kimi = isinstance(spec, KimiDeltaAttention)
    gates = gate.to(wide).sigmoid() if kimi else F.silu(gate.to(wide))
    gate_first = isinstance(spec, Mamba2)
    parts = spec.norm_groups if isinstance(spec, Mamba2) else out.shape[2]
    x = out.flatten(2)
    # The recurrence's output is rounded to the model's dtype, as in transformers.
    x = x.to(dtype).to(wide)
    if gate_first:
        x = x * gates
    x = torch.unflatten(x, -1, (parts, -1))
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + layer.norm.eps)
    if kimi:
        return ((layer.norm.weight.to(wide) * x).flatten(2) * gates).to(dtype)
    weight = torch.unflatten(layer.norm.weight, 0, (parts, -1)) if gate_first else layer.norm.weight
    x = (weight * x.to(dtype)).flatten(2)
    return x if gate_first else (x.to(wide) * gates).to(dtype)
