"""MiMo-V2-Flash: values have fewer dimensions than keys; layers with a window have twice the KV heads, and sinks."""

from dataclasses import replace

from tandem.engine.config.attention import AttentionShape
from tandem.engine.config.model import GroupedQueryAttention, LayerSpec, MixtureOfExperts, ModelSpec
from tandem.engine.config.rope import rotary_fraction
from tandem.engine.models.families.family import (
    Family,
    Json,
    check_sizes,
    grouped_layers,
    make_model,
    parse_dense_layers,
    parse_expert_count,
    parse_shape,
    parse_sigmoid_router,
    parse_window,
    ropes_by_type,
    windows_by_type,
    with_dense,
    with_window_rope,
)
from tandem.engine.models.parameters import Parameters
from tandem.engine.models.slots import ParameterSlot, renamed, standard_slots
from tandem.protocol.errors import ModelError

_DEFAULTS = {"head_dim": 192, "v_head_dim": 128, "sliding_window": 129, "partial_rotary_factor": 0.334}
"""The defaults of transformers for fields that config.json may leave out."""
_FULL_THETA, _WINDOW_THETA = 5e6, 1e4
"""The RoPE thetas of layers without and with a window, if config.json has none."""
_VALUE_SCALE = 0.707
"""The factor of values if config.json has none."""


def _parse(given: Json) -> ModelSpec:
    config = _DEFAULTS | dict(given)
    if config.get("sliding_window_size") is not None:
        config["sliding_window"] = int(config["sliding_window_size"]) + 1  # without the token itself
    windows = windows_by_type(config, parse_window(config), lambda number: _layer_type(config, number))
    experts = MixtureOfExperts(
        experts=parse_expert_count(config),
        top_k=int(config["num_experts_per_tok"]),
        width=int(config["moe_intermediate_size"]),
        router=parse_sigmoid_router(config),
    )
    full, local = ropes_by_type(config, _FULL_THETA, float(config.get("swa_rope_theta") or _WINDOW_THETA))
    layers = grouped_layers(
        config, _shape(config), windows, experts, rope=full, qkv_bias=bool(config.get("attention_bias"))
    )
    scale = config.get("attention_value_scale", _VALUE_SCALE)
    layers = [_layer(with_window_rope(layer, local), 1.0 if scale is None else float(scale)) for layer in layers]
    return make_model(
        config,
        "MiMoV2FlashForCausalLM",
        with_dense(config, layers, _dense_layers(config)),
        norm_eps=float(config.get("rms_norm_eps") or config.get("layernorm_epsilon") or 1e-5),
    )


def _shape(config: Json) -> AttentionShape:
    """Return the shape of the layers without a window. Raises ModelError if that of the others is not supported."""
    by_type = config.get("rope_parameters") or {}
    fractions = {rotary_fraction({**config, "rope_parameters": by_type.get(kind)}) for kind in _LAYER_TYPES}
    if len(fractions) > 1:
        raise ModelError("layers with and without a window rotate different fractions of each head.")
    shape = parse_shape({**config, "rope_parameters": None, "partial_rotary_factor": fractions.pop()})
    expected = {
        "swa_num_attention_heads": shape.heads,
        "swa_num_key_value_heads": 2 * shape.kv_heads,
        "swa_head_dim": shape.head_dim,
        "swa_v_head_dim": int(config["v_head_dim"]),
    }
    for name, size in expected.items():
        if config.get(name) not in {None, size}:
            raise ModelError(f"{name} {config[name]} is not supported; it must be {size}.")
    check_sizes(v_head_dim=int(config["v_head_dim"]))
    if shape.heads % (2 * shape.kv_heads):
        raise ModelError(f"{shape.heads} heads do not divide into the {2 * shape.kv_heads} KV heads of a window layer.")
    return shape if config["v_head_dim"] == shape.head_dim else replace(shape, value_dim=int(config["v_head_dim"]))


_LAYER_TYPES = ("full_attention", "sliding_attention")


def _layer_type(config: Json, number: int) -> str:
    """Return the attention type of a layer; without a pattern, the first and every sixth layer have no window."""
    pattern = config.get("hybrid_layer_pattern")
    if pattern is not None:
        return _LAYER_TYPES[int(pattern[number])]
    return _LAYER_TYPES[number > 0 and (number + 1) % 6 > 0]


def _dense_layers(config: Json) -> list[int]:
    """Return the numbers of the layers without experts, by default the first."""
    sparse = config.get("moe_layer_freq")
    if isinstance(sparse, list) and not config.get("mlp_layer_types"):
        return [number for number, has_experts in enumerate(sparse) if not has_experts]
    return parse_dense_layers(config, first=1)


def _layer(layer: LayerSpec, scale: float) -> LayerSpec:
    attention = layer.attention
    assert isinstance(attention, GroupedQueryAttention)
    attention, shape = replace(attention, output_scale=scale), attention.shape
    if shape.window is not None:
        attention = replace(attention, sinks=True, shape=replace(shape, kv_heads=2 * shape.kv_heads))
    return replace(layer, attention=attention)


def _slots(spec: ModelSpec, parameters: Parameters) -> dict[str, ParameterSlot]:
    return renamed(standard_slots(spec, parameters), {"self_attn.sinks": "self_attn.attention_sink_bias"})


FAMILY = Family(("MiMoV2FlashForCausalLM",), ("mimo_v2_flash",), _parse, _slots)
