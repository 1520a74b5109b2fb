"""State layers in plain PyTorch, the reference of all other implementations. The arithmetic is in float32 or wider."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.engine.config.model import GatedDeltaNet, Mamba2, ShortConvolution
from tandem.engine.kernels.base import DraftGroups, StepLayout, is_cpu
from tandem.engine.kernels.kv_cache import StateCache
from tandem.engine.kernels.layers import RecurrentLayer
from tandem.engine.kernels.states.recurrence import recurrence

_State = tuple[Tensor | None, Tensor]
"""Recurrent states [B, heads, *state], None if the layer has none, and inputs [B, heads, channels, inputs] of rows."""
_SCRATCH = -1
"""The last page, which no request has: states that are not kept are written to it, and those of padding rows."""
_UNIT_EPS = 1e-6
"""The epsilon with which Gated DeltaNet normalizes queries and keys to unit length."""


def mix_states(projected: Tensor, layer: RecurrentLayer, cache: StateCache, layout: StepLayout) -> Tensor:
    """Advance the states of the step's rows; see `Kernels.mix_states`."""
    assert layout.state_pages is not None
    pages, groups = layout.state_pages.long(), layout.draft_groups
    # Padding tokens, which are in no row, write to the last row.
    out = projected.new_zeros(len(projected) + 1, layer.spec.inner)
    rows = len(pages)
    # Steps of one-token rows do not wait for the device, so that CUDA graphs can contain them.
    bounds: Sequence[int] = range(rows + 1) if layout.decode_only else layout.row_starts.tolist()
    single = rows if layout.decode_only else layout.single_rows
    # The rows of one token are computed together, the others one after the other.
    spans = [(0, single)] if single and groups is None else []
    for first, last in (*spans, *((row, row + 1) for row in range(single, rows))):
        tokens = slice(bounds[first], bounds[last])
        if tokens.start == tokens.stop:
            continue
        part = torch.unflatten(projected[tokens], 0, (last - first, -1))
        read, write = pages[first:last].unbind(1)
        mixed, state = _rows(part, layer, _read(cache, layer, read))
        out[tokens] = mixed.flatten(0, 1)
        _write(cache, layer, write, state)
    if groups is not None:
        alone = groups.table[:-1, 2] == 1
        for distance, (row, active, mixed, state) in enumerate(_chains(projected, layer, cache, pages, groups)):
            out[torch.where(active, row, len(projected))] = mixed
            if distance == 0:
                _write(cache, layer, torch.where(alone, pages[row, 1], _SCRATCH), state)
    return out[:-1]


def accept_drafts(
    projected: Tensor, layer: RecurrentLayer, cache: StateCache, layout: StepLayout, accepted: Tensor
) -> None:
    """Write the states after accepted draft tokens; see `Kernels.accept_drafts`."""
    assert layout.state_pages is not None
    assert layout.draft_groups is not None
    pages, groups = layout.state_pages.long(), layout.draft_groups
    several = groups.table[:-1, 2] > 1
    chains = _chains(projected, layer, cache, pages, groups, 1 + _largest(accepted, groups.rows - 1))
    for distance, (row, _, _, state) in enumerate(chains):
        _write(cache, layer, torch.where(several & (distance <= accepted), pages[row, 1], _SCRATCH), state)


def _chains(
    projected: Tensor,
    layer: RecurrentLayer,
    cache: StateCache,
    pages: Tensor,
    groups: DraftGroups,
    rows: int | None = None,
) -> Iterator[tuple[Tensor, Tensor, Tensor, _State]]:
    """Yield the results of the groups' first rows, then those of their second rows, and so on up to row `rows` - 1.

    Each is the number of the row in the step [groups], whether the group has that row [groups], the row's output
    [groups, inner], and the states after it. Groups without that row have the results of a row of others.
    """
    first, following, count = groups.table[:-1].long().unbind(1)
    state = _read(cache, layer, pages[first, 0])
    for distance in range(_largest(count, groups.rows) if rows is None else rows):
        active = distance < count
        row = torch.where(active, first if distance == 0 else following + (distance - 1), 0)
        mixed, state = _rows(projected[row].unsqueeze(1), layer, state)
        yield row, active, mixed[:, 0], state


def _largest(counts: Tensor, bound: int) -> int:
    """Return an upper bound of the counts: the largest, or `bound` on a device for which this would have to wait."""
    return int(counts.max()) if is_cpu(counts.device) else bound


def _read(cache: StateCache, layer: RecurrentLayer, pages: Tensor) -> _State:
    """Return the states and inputs in these pages, one for each row; those of page -1 are zeros."""
    fresh, pages = pages < 0, pages.clamp(min=0)
    inputs = cache.inputs[pages, layer.index].masked_fill(fresh[:, None, None, None], 0)
    if cache.states is None:
        return None, inputs
    return cache.states[pages, layer.index].masked_fill(fresh[:, None, None, None, None], 0), inputs


def _write(cache: StateCache, layer: RecurrentLayer, pages: Tensor, state: _State) -> None:
    """Write the states and inputs of rows to these pages."""
    recurrent, inputs = state
    cache.inputs[pages, layer.index] = inputs
    if cache.states is not None and recurrent is not None:
        cache.states[pages, layer.index] = recurrent.to(cache.states.dtype)


def _rows(projected: Tensor, layer: RecurrentLayer, before: _State) -> tuple[Tensor, _State]:
    """Return the output [B, L, inner] of B rows of L tokens, and the states after them, from the states before them."""
    spec, dtype = layer.spec, projected.dtype
    wide = torch.promote_types(dtype, torch.float32)
    state, inputs = before
    parts = projected.split_with_sizes(spec.projected, -1)
    if isinstance(spec, ShortConvolution):
        gate_in, gate_out, x = parts
        mixed, inputs = _convolve(layer, inputs, [gate_in * x])
        return (gate_out.to(wide) * mixed[0].flatten(2)).to(dtype), (None, inputs)
    assert state is not None
    kept = state.dtype
    if isinstance(spec, GatedDeltaNet):
        q, k, v, gate, step, decay = parts
        mixed, inputs = _convolve(layer, inputs, [q, k, v])
        out, state = _delta_rule(layer, spec, [F.silu(part) for part in mixed], step.to(wide), decay.to(wide), state)
    else:
        assert isinstance(spec, Mamba2)
        gate, x, b, c, dt = parts
        mixed, inputs = _convolve(layer, inputs, [x, b, c])
        out, state = _selective(layer, spec, [F.silu(part) for part in mixed], dt.to(wide), state)
    return _gated_norm(out, gate, layer, dtype), (state.to(kept), inputs)


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
    out, last = recurrence(q * spec.key_dim**-0.5, k, v, log_decay.transpose(1, 2), steps.transpose(1, 2), initial)
    return out.transpose(1, 2), torch.unflatten(last, 1, (spec.key_heads, shared))


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
    out, last = recurrence(c, b, values, log_decay.transpose(1, 2), None, initial)
    return out.transpose(1, 2) + layer.skip[:, None] * heads, torch.unflatten(last, 1, (spec.groups, shared))


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _UNIT_EPS)


def _gated_norm(out: Tensor, gate: Tensor, layer: RecurrentLayer, dtype: torch.dtype) -> Tensor:
    """Return the gated and normalized output [B, L, inner] of the heads [B, L, heads, dim].

    Mamba-2 applies the gate before the norm, Gated DeltaNet after it.
    """
    spec, wide = layer.spec, out.dtype
    assert layer.norm is not None
    gates = F.silu(gate.to(wide))
    gate_first = isinstance(spec, Mamba2)
    parts = spec.norm_groups if isinstance(spec, Mamba2) else out.shape[2]
    x = out.flatten(2)
    # The recurrence's output is rounded to the model's dtype, as in transformers.
    x = x.to(dtype).to(wide)
    if gate_first:
        x = x * gates
    x = torch.unflatten(x, -1, (parts, -1))
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + layer.norm.eps)
    weight = torch.unflatten(layer.norm.weight, 0, (parts, -1)) if gate_first else layer.norm.weight
    x = (weight * x.to(dtype)).flatten(2)
    return x if gate_first else (x.to(wide) * gates).to(dtype)
