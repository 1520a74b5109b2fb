"""State layers of one-token rows on GPUs: convolution, recurrence and gated norm in one launch.

One program computes one value head of one row. It reads the head's state [K, V] in float32 once and writes it once, in
tiles of all keys by `BLOCK_V` values. The convolution's inputs of a key head belong to several value heads, so a second
launch stores the new ones after all programs have read the old ones.
"""

import triton
from torch import Tensor

from tandem.engine.config.model import GatedDeltaNet
from tandem.engine.kernels.kv_cache import StateCache
from tandem.engine.kernels.layers import RecurrentLayer

_TILE = 32
"""The maximum number of values of a tile of the state."""
_INPUT_BLOCK = 256


def decode_delta(
    projected: Tensor, layer: RecurrentLayer, cache: StateCache, state_pages: Tensor, out: Tensor, *, pdl: bool
) -> None:
    """Compute Gated DeltaNet for rows of one token, and write their states.

    projected [B, sum(projected)] and out [B, inner] are contiguous; state_pages [B, 2] int32 as in `StepLayout`. Padding
    rows, which have no page to write to, get an undefined output.
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
