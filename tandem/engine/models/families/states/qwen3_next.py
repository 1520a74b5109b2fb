"""Qwen3-Next: three of four layers are Gated DeltaNet, and the others are attention with an output gate."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tandem.engine.config.model import (
    ExpertRouter,
    FeedForward,
    GroupedQueryAttention,
    LayerSpec,
    MixtureOfExperts,
    ModelSpec,
)
from tandem.engine.config.state_layers import GatedDeltaNet
from tandem.engine.models.families.dense.gemma2 import plus_one_norms
from tandem.engine.models.families.experts.qwen3_moe import dense_layers
from tandem.engine.models.families.family import (
    Family,
    Json,
    check_sizes,
    grouped_layers,
    make_model,
    parse_activation,
    parse_expert_count,
    parse_shape,
    with_dense,
)
from tandem.engine.models.mtp_layout import MtpLayout
from tandem.engine.models.parameters import Parameters, StateParameters
from tandem.engine.models.slots import ParameterSlot, renamed, standard_slots, state_slots
from tandem.protocol.errors import ModelError

_HEAD_DIM = 256
"""The head dimension of attention if config.json does not have it, as in transformers."""
_ROTATED = 0.25
"""The part of each head's dimensions that is rotated if config.json does not have it, as in transformers."""
_INTERVAL = 4
"""One in this number of layers has attention if config.json does not say otherwise, as in transformers."""
_DEFAULTS = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
QWEN_MTP = MtpLayout(
    prefix="mtp.layers.0.",
    projection="mtp.fc.weight",
    embedding_norm="mtp.pre_fc_norm_embedding.weight",
    state_norm="mtp.pre_fc_norm_hidden.weight",
    output_norm="mtp.norm.weight",
)
_NAMES = {
    "convolution": "conv1d.weight",
    "decay_log": "A_log",
    "step_bias": "dt_bias",
    "state_norm": "norm.weight",
    "output": "out_proj.weight",
}


def parse_delta_net(config: Json) -> GatedDeltaNet:
    """Return the Gated DeltaNet of a config.json. Raises ModelError for sizes that are not supported."""
    sizes = {name: int(config.get(name) or default) for name, default in _DEFAULTS.items()}
    check_sizes(**sizes)
    key_heads, value_heads = sizes["linear_num_key_heads"], sizes["linear_num_value_heads"]
    if value_heads % key_heads:
        raise ModelError(
            f"linear_num_value_heads {value_heads} is not a multiple of linear_num_key_heads {key_heads}; give a"
            " multiple of it."
        )
    if sizes["linear_conv_kernel_dim"] == 1:
        raise ModelError("linear_conv_kernel_dim 1 is not supported; it must be at least 2.")
    if parse_activation(config) != "silu":
        raise ModelError(f"hidden_act {config.get('hidden_act')!r} is not supported for state layers; silu is.")
    return GatedDeltaNet(
        key_heads,
        value_heads,
        sizes["linear_key_head_dim"],
        sizes["linear_value_head_dim"],
        sizes["linear_conv_kernel_dim"],
        float(config.get("rms_norm_eps") or 1e-6),
    )


def delta_layers(config: Json) -> tuple[bool, ...]:
    """Return for each layer whether it is Gated DeltaNet. Raises ModelError for layer types that are not supported."""
    layers = int(config["num_hidden_layers"])
    every = int(config.get("full_attention_interval") or _INTERVAL)
    kinds: Sequence[str] = config.get("layer_types") or [
        "linear_attention" if (number + 1) % every else "full_attention" for number in range(layers)
    ]
    if len(kinds) != layers:
        raise ModelError(f"layer_types names {len(kinds)} layers, num_hidden_layers is {layers}.")
    unknown = set(kinds) - {"linear_attention", "full_attention"}
    if unknown:
        raise ModelError(f"layer type {min(unknown)!r} is not supported; supported are full and linear attention.")
    return tuple(kind == "linear_attention" for kind in kinds)


def gated_layers(config: Json, feed_forward: FeedForward) -> list[LayerSpec]:
    """Return layers of Gated DeltaNet, and of attention with an output gate, as `layer_types` names them."""
    rotated = {"partial_rotary_factor": _ROTATED} | dict(config)
    shape, biased = parse_shape(rotated, head_dim=_HEAD_DIM), bool(config.get("attention_bias"))
    (attention,) = grouped_layers(
        rotated, shape, (None,), feed_forward, qkv_bias=biased, output_bias=biased, qk_norm=shape.head_dim
    )
    assert isinstance(attention.attention, GroupedQueryAttention)
    attention = replace(attention, attention=replace(attention.attention, output_gate=True))
    delta = replace(attention, attention=parse_delta_net(config))
    return [delta if is_delta else attention for is_delta in delta_layers(config)]


def gated_experts(config: Json) -> MixtureOfExperts:
    """Return the experts, with a shared expert that has a gate of its own."""
    return MixtureOfExperts(
        experts=parse_expert_count(config),
        top_k=int(config["num_experts_per_tok"]),
        width=int(config["moe_intermediate_size"]),
        router=ExpertRouter(renormalize=bool(config.get("norm_topk_prob", True))),
        shared_width=int(config["shared_expert_intermediate_size"]),
        shared_gate=True,
    )


def delta_slots(spec: ModelSpec, parameters: Parameters) -> dict[str, ParameterSlot]:
    """Return the slots of all tensors but the input projections of Gated DeltaNet.

    The checkpoint stores the weights of all norms minus 1, except the output norm of Gated DeltaNet.
    """
    slots = renamed(standard_slots(spec, parameters), {".mlp.shared_experts.": ".mlp.shared_expert."})
    slots = plus_one_norms(slots)
    for number, layer, weights in delta_weights(spec, parameters):
        prefix = f"model.layers.{number}.linear_attn."
        slots |= {prefix + name: slot for name, slot in state_slots(layer, weights, _NAMES).items()}
    return slots


def delta_weights(spec: ModelSpec, parameters: Parameters) -> list[tuple[int, GatedDeltaNet, StateParameters]]:
    """Return the number, the spec and the weights of each layer that is Gated DeltaNet."""
    return [
        (number, layer.attention, weights.attention)
        for number, (layer, weights) in enumerate(zip(spec.layers, parameters.layers, strict=True))
        if isinstance(layer.attention, GatedDeltaNet) and isinstance(weights.attention, StateParameters)
    ]


def _parse(config: Json) -> ModelSpec:
    layers = with_dense(config, gated_layers(config, gated_experts(config)), dense_layers(config))
    return make_model(config, "Qwen3NextForCausalLM", layers, wide_norms=True)


def _slots(spec: ModelSpec, parameters: Parameters) -> dict[str, ParameterSlot]:
    """Return the slots; the input projections are stored key head by key head, in two tensors."""
    slots = delta_slots(spec, parameters)
    for number, layer, weights in delta_weights(spec, parameters):
        shared = layer.value_heads // layer.key_heads
        values = shared * layer.value_dim
        first = sum(layer.projected[:4])
        prefix = f"model.layers.{number}.linear_attn."
        slots[f"{prefix}in_proj_qkvz.weight"] = ParameterSlot(
            weights.projections[:first], _by_part(layer.key_heads, layer.key_dim, layer.key_dim, values, values)
        )
        slots[f"{prefix}in_proj_ba.weight"] = ParameterSlot(
            weights.projections[first:], _by_part(layer.key_heads, shared, shared)
        )
    return slots


def _by_part(heads: int, *parts: int) -> Callable[[Tensor], Tensor]:
    """Return a function that orders rows by projection, which are stored by head: `parts` rows of each projection."""

    def ordered(stored: Tensor) -> Tensor:
        by_head = torch.unflatten(stored, 0, (heads, -1))
        return torch.cat([part.flatten(0, 1) for part in by_head.split_with_sizes(parts, 1)])

    return ordered


FAMILY = Family(("Qwen3NextForCausalLM",), ("qwen3_next",), _parse, _slots, QWEN_MTP)
