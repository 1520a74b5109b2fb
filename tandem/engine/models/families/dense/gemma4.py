"""Gemma 4, text: two head dimensions, shared keys and values, embeddings of each layer.

Layers with experts have a dense network beside them, the shared expert, which has other norms than they have.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from tandem.engine.config.attention import AttentionShape
from tandem.engine.config.model import (
    DenseFeedForward,
    ExpertRouter,
    FeedForward,
    GroupedQueryAttention,
    LayerSpec,
    MixtureOfExperts,
    ModelSpec,
)
from tandem.engine.config.rope import RopeConfig, parse_rope
from tandem.engine.kernels.layers import Experts
from tandem.engine.models.families.dense.gemma2 import gemma_model, output_norm_slots
from tandem.engine.models.families.family import (
    Family,
    Json,
    parse_dense,
    parse_expert_count,
    parse_shape,
    parse_window,
    windows_by_type,
)
from tandem.engine.models.parameters import AttentionParameters, LayerParameters, Parameters
from tandem.engine.models.slots import ParameterSlot, renamed
from tandem.protocol.errors import ModelError

_DEFAULTS = {
    "vocab_size": 262_144,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
}
"""The defaults of transformers for fields that config.json may leave out."""
_ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
"""The RoPE of layers without and with a window, if config.json has none."""


def _parse(given: Json) -> ModelSpec:
    config = _DEFAULTS | dict(given)
    _check(config)
    last = int(config["num_hidden_layers"]) - 1
    windows = windows_by_type(
        config, parse_window(config), lambda number: "sliding_attention" if (number + 1) % 6 else "full_attention"
    )
    windows = (*windows[:last], None)  # the last layer never has a window
    sources = _kv_layers(windows, int(config.get("num_kv_shared_layers") or 0))
    dense = parse_dense(config, activation="gelu_pytorch_tanh")
    doubled = replace(dense, width=2 * dense.width) if config.get("use_double_wide_mlp") else dense
    networks = [_network(config, dense if source is None else doubled) for source in sources]
    ropes = {kind: parse_rope(config, settings) for kind, settings in _ropes(config).items()}
    layers = [
        LayerSpec(
            _attention(config, number, window, source, ropes["sliding_attention" if window else "full_attention"]),
            network,
            output_norms=True,
            scaled=True,
        )
        for number, (window, source, network) in enumerate(zip(windows, sources, networks, strict=True))
    ]
    model = gemma_model(config, "Gemma4ForCausalLM", layers)
    return replace(model, layer_embedding=int(config["hidden_size_per_layer_input"] or 0))


def _check(config: Json) -> None:
    """Raise ModelError for what is not computed, by its field."""
    if config.get("use_bidirectional_attention") == "all":
        raise ModelError("use_bidirectional_attention 'all' is not supported; attention is causal.")
    own = config.get("vocab_size_per_layer_input")
    if config["hidden_size_per_layer_input"] and own not in {None, config["vocab_size"]}:
        raise ModelError(f"vocab_size_per_layer_input {own} is not supported; it must be {config['vocab_size']}.")


def _network(config: Json, dense: DenseFeedForward) -> FeedForward:
    """Return the feed-forward network of a layer: `dense`, or experts beside it."""
    if not config.get("enable_moe_block"):
        return dense
    return MixtureOfExperts(
        experts=parse_expert_count(config),
        top_k=int(config["top_k_experts"]),
        width=int(config["moe_intermediate_size"]),
        router=ExpertRouter(own_norm=True, expert_scales=True),
        activation=dense.activation,
        shared_width=dense.width,
        separate_norms=True,
    )


def _ropes(config: Json) -> Json:
    """Return the RoPE settings of layers without and with a window."""
    named = config.get("rope_parameters") or {}
    return {kind: named.get(kind) or settings for kind, settings in _ROPES.items()}


def _kv_layers(windows: Sequence[int | None], shared: int) -> list[int | None]:
    """Return the layer whose keys and values each layer uses: for the last `shared` layers, the last one of its type.

    None = the layer has its own. Raises ModelError if there is no such layer.
    """
    own = len(windows) - shared
    last = {window is None: number for number, window in enumerate(windows[: max(own, 0)])}
    if shared and not {window is None for window in windows} <= last.keys():
        raise ModelError(f"num_kv_shared_layers {shared} is not supported: no layer has the keys and values to share.")
    return [None if number < own else last[window is None] for number, window in enumerate(windows)]


def _attention(
    config: Json, number: int, window: int | None, source: int | None, rope: RopeConfig
) -> GroupedQueryAttention:
    biased, equal = bool(config.get("attention_bias")), bool(config.get("attention_k_eq_v")) and window is None
    shape = replace(_shape(config, number, window), window=window)
    return GroupedQueryAttention(
        shape,
        rope,
        qkv_bias=biased,
        output_bias=biased,
        qk_norm=shape.head_dim,
        value_norm=True,
        values_from_keys=equal and source is None,
        kv_layer=source,
    )


def _shape(config: Json, number: int, window: int | None) -> AttentionShape:
    """Return the shape of a layer; those without a window have heads of their own, which may be named by layer."""
    if window is not None:
        return parse_shape({**config, "rope_parameters": None}, scale=1.0)
    heads = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else None
    overrides = {
        "head_dim": config["global_head_dim"],
        "num_key_value_heads": heads or config["num_key_value_heads"],
        "rope_parameters": None,
        **(config.get("per_layer_config") or {}).get(str(number), {}),
    }
    return parse_shape({**config, **overrides}, scale=1.0)


def _slots(spec: ModelSpec, parameters: Parameters) -> dict[str, ParameterSlot]:
    slots = renamed(output_norm_slots(spec, parameters), {"mlp.shared_experts.": "mlp."})
    slots = {name: slot for name, slot in slots.items() if ".mlp.gate." not in name and ".mlp.experts." not in name}
    if parameters.layer_embedding is not None:
        slots["model.embed_tokens_per_layer.weight"] = ParameterSlot(parameters.layer_embedding.table)
        slots["model.per_layer_model_projection.weight"] = ParameterSlot(parameters.layer_embedding.projection)
        slots["model.per_layer_projection_norm.weight"] = ParameterSlot(parameters.layer_embedding.norm)
    for number, (layer, weights) in enumerate(zip(spec.layers, parameters.layers, strict=True)):
        prefix = f"model.layers.{number}."
        assert weights.scale is not None
        slots[f"{prefix}layer_scalar"] = ParameterSlot(weights.scale)
        if isinstance(weights.feed_forward, Experts):
            slots |= _expert_slots(prefix, spec.hidden_size, weights, weights.feed_forward)
        if weights.embedding is not None:
            slots[f"{prefix}per_layer_input_gate.weight"] = ParameterSlot(weights.embedding.gate)
            slots[f"{prefix}per_layer_projection.weight"] = ParameterSlot(weights.embedding.output)
            slots[f"{prefix}post_per_layer_input_norm.weight"] = ParameterSlot(weights.embedding.norm)
        if isinstance(layer.attention, GroupedQueryAttention) and layer.attention.values_from_keys:
            assert isinstance(weights.attention, AttentionParameters)
            slots |= _doubled_keys(f"{prefix}self_attn.", layer.attention.shape, weights.attention)
            slots = {name: slot for name, slot in slots.items() if not name.startswith(f"{prefix}self_attn.v_proj")}
    return slots


def _expert_slots(prefix: str, hidden: int, weights: LayerParameters, experts: Experts) -> dict[str, ParameterSlot]:
    """Return the slots of a layer's experts, which the checkpoint stacks, of their router and of their norms."""
    norms = weights.expert_norms
    assert norms is not None
    assert experts.router_norm is not None
    assert experts.expert_scales is not None
    rows = experts.gate_up.shape[1] // 2
    slots = {
        "router.proj.weight": ParameterSlot(experts.router),
        # After its norm the router's input is divided by √H.
        "router.scale": ParameterSlot(experts.router_norm, partial(torch.mul, other=hidden**-0.5)),
        "router.per_expert_scale": ParameterSlot(experts.expert_scales),
        "experts.gate_up_proj": ParameterSlot(experts.gate_up, stacked=(rows, rows)),
        "experts.down_proj": ParameterSlot(experts.down),
        "pre_feedforward_layernorm_2.weight": ParameterSlot(norms.input_norm),
        "post_feedforward_layernorm_1.weight": ParameterSlot(norms.shared_output_norm),
        "post_feedforward_layernorm_2.weight": ParameterSlot(norms.output_norm),
    }
    return {prefix + name: slot for name, slot in slots.items()}


def _doubled_keys(prefix: str, shape: AttentionShape, weights: AttentionParameters) -> dict[str, ParameterSlot]:
    """Return the slots of the projection of keys, whose rows are also those of the values."""
    queries, keys, _ = shape.qkv_rows
    _, both = weights.qkv.split_with_sizes((queries, 2 * keys))
    slots = {f"{prefix}k_proj.weight": ParameterSlot(both, _twice, (keys, both.shape[1]))}
    if weights.qkv_bias is not None:
        slots[f"{prefix}k_proj.bias"] = ParameterSlot(weights.qkv_bias[queries:], _twice, (keys,))
    return slots


def _twice(stored: Tensor) -> Tensor:
    return torch.cat((stored, stored))


FAMILY = Family(("Gemma4ForCausalLM",), ("gemma4_text",), _parse, _slots)
