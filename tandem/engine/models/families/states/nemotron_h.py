"""Nemotron-H and Nemotron 3: blocks of one mixer each: Mamba-2, attention, or a network or experts without a gate.

A mixer of tokens and the feed-forward network after it, if there is one, are one layer of the spec.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from tandem.engine.config.model import FeedForward, LayerSpec, MixtureOfExperts, ModelSpec
from tandem.engine.config.state_layers import Mamba2
from tandem.engine.kernels.layers import Experts
from tandem.engine.models.families.family import (
    Family,
    Json,
    check_sizes,
    grouped_layers,
    make_model,
    parse_expert_count,
    parse_shape,
    parse_sigmoid_router,
    parse_ungated,
    without_rope,
)
from tandem.engine.models.parameters import DenseParameters, LayerParameters, Parameters, StateParameters
from tandem.engine.models.slots import ParameterSlot, dense_slots, expert_slots, layer_slots, renamed, state_slots
from tandem.protocol.errors import ModelError

_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_NETWORKS = {"mlp", "moe"}
OLD_LAYER_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}
"""The layer types of transformers 4, each with its name in transformers 5."""
_NAMES = {
    "convolution": "conv1d.weight",
    "convolution_bias": "conv1d.bias",
    "decay_log": "A_log",
    "step_bias": "dt_bias",
    "skip": "D",
    "state_norm": "norm.weight",
    "output": "out_proj.weight",
    "output_bias": "out_proj.bias",
}


def mamba_slots(prefix: str, spec: Mamba2, weights: StateParameters) -> dict[str, ParameterSlot]:
    """Return the slots of a Mamba-2 layer by tensor name, with the names of the original implementation."""
    slots = state_slots(spec, weights, _NAMES)
    slots["in_proj.weight"] = ParameterSlot(weights.projections, stacked=spec.projected)
    if weights.projections_bias is not None:
        slots["in_proj.bias"] = ParameterSlot(weights.projections_bias, stacked=spec.projected)
    return {prefix + name: slot for name, slot in slots.items()}


def check_mamba(mamba: Mamba2, activation: str) -> None:
    """Raise ModelError for a Mamba-2 layer whose sizes, or whose activation after the convolution, are unsupported."""
    check_sizes(
        mamba_heads=mamba.heads,
        mamba_head_dim=mamba.head_dim,
        mamba_groups=mamba.groups,
        mamba_state_size=mamba.state_dim,
    )
    if mamba.heads % mamba.groups:
        raise ModelError(f"the {mamba.heads} heads of Mamba-2 do not divide into {mamba.groups} groups.")
    if mamba.width < 2:
        raise ModelError(f"a convolution of width {mamba.width} is not supported; it must be at least 2.")
    if activation != "silu":
        raise ModelError(f"activation {activation!r} is not supported for Mamba-2; silu is.")


def _mamba(config: Json, norm_eps: float) -> Mamba2:
    groups = int(config.get("n_groups") or config.get("mamba_n_groups") or 8)
    mamba = Mamba2(
        heads=int(config.get("mamba_num_heads") or 128),
        head_dim=int(config.get("mamba_head_dim") or 64),
        groups=groups,
        state_dim=int(config.get("ssm_state_size") or 128),
        width=int(config.get("conv_kernel") or config.get("mamba_d_conv") or 4),
        norm_eps=norm_eps,
        norm_groups=groups,
        convolution_bias=bool(config.get("use_conv_bias", True)),
        bias=bool(config.get("use_bias")),
        least_step=float(config.get("time_step_min", config.get("mamba_dt_min", 0.001))),
    )
    check_mamba(mamba, config.get("mamba_hidden_act", "silu"))
    return mamba


def _blocks(config: Json) -> Sequence[str]:
    """Return the kind of each block, from `layers_block_type` (transformers 5) or `hybrid_override_pattern`."""
    named: Sequence[str] = config.get("layers_block_type") or config.get("layer_types") or ()
    kinds = [OLD_LAYER_TYPES.get(kind, kind) for kind in named] or [
        _LETTERS.get(letter, letter) for letter in config["hybrid_override_pattern"]
    ]
    unknown = set(kinds) - set(_LETTERS.values())
    if unknown:
        raise ModelError(
            f"block type {min(unknown)!r} of Nemotron-H is not supported; supported are {', '.join(_LETTERS.values())}."
        )
    if any(kind in _NETWORKS and before in {"", *_NETWORKS} for before, kind in pairwise(["", *kinds])):
        raise ModelError("a block mlp or moe of Nemotron-H is supported only after a block with attention or Mamba-2.")
    return kinds


def _experts(config: Json) -> MixtureOfExperts:
    latent = config.get("moe_latent_size")
    if latent is not None:
        check_sizes(moe_latent_size=int(latent))
    if config.get("mlp_bias"):
        raise ModelError("mlp_bias is not supported for experts.")
    return MixtureOfExperts(
        experts=parse_expert_count(config),
        top_k=int(config["num_experts_per_tok"]),
        width=int(config["moe_intermediate_size"]),
        router=parse_sigmoid_router(config),
        activation=parse_ungated(config).activation,
        shared_width=int(config["moe_shared_expert_intermediate_size"]),
        latent=int(latent or 0),
    )


def _parse(given: Json) -> ModelSpec:
    config = {"head_dim": 128} | dict(given) | {"hidden_act": given.get("mlp_hidden_act", "relu2")}
    norm_eps = float(config.get("layer_norm_epsilon") or config.get("rms_norm_eps") or 1e-5)
    (attention,) = grouped_layers(config, parse_shape(config), (None,), parse_ungated(config))
    mixers = {
        "full_attention": without_rope(attention),
        "linear_attention": replace(attention, attention=_mamba(config, norm_eps)),
    }
    kinds = _blocks(config)
    networks: dict[str, FeedForward | None] = {"mlp": attention.feed_forward}
    if "moe" in kinds:
        networks["moe"] = _experts(config)
    layers = [
        replace(mixers[kind], feed_forward=networks.get(follower))
        for kind, follower in pairwise([*kinds, ""])
        if kind in mixers
    ]
    return make_model(config, "NemotronHForCausalLM", layers, norm_eps=norm_eps)


def _slots(spec: ModelSpec, parameters: Parameters) -> dict[str, ParameterSlot]:
    slots = {
        "backbone.embeddings.weight": ParameterSlot(parameters.embedding),
        "backbone.norm_f.weight": ParameterSlot(parameters.final_norm),
    }
    if not spec.tied_embeddings:
        slots["lm_head.weight"] = ParameterSlot(parameters.lm_head)
    number = 0
    for layer, weights in zip(spec.layers, parameters.layers, strict=True):
        for block in _block_slots(layer, weights):
            slots |= {f"backbone.layers.{number}.{name}": slot for name, slot in block.items()}
            number += 1
    return slots


def _block_slots(layer: LayerSpec, weights: LayerParameters) -> Iterator[dict[str, ParameterSlot]]:
    """Yield the slots of each block of a layer: those of its mixer of tokens, then of its feed-forward network."""
    assert weights.input_norm is not None
    norm = {"norm.weight": ParameterSlot(weights.input_norm)}
    if isinstance(layer.attention, Mamba2) and isinstance(weights.attention, StateParameters):
        yield norm | mamba_slots("mixer.", layer.attention, weights.attention)
    else:
        named = layer_slots(replace(layer, feed_forward=None), replace(weights, feed_forward=None))
        start = "self_attn."
        yield norm | {
            f"mixer.{name.removeprefix(start)}": slot for name, slot in named.items() if name.startswith(start)
        }
    if isinstance(weights.feed_forward, DenseParameters):
        assert weights.feed_forward_norm is not None
        network = dense_slots("mixer.", weights.feed_forward, gated=False)
        yield {"norm.weight": ParameterSlot(weights.feed_forward_norm)} | network
    elif isinstance(weights.feed_forward, Experts):
        assert weights.feed_forward_norm is not None
        assert isinstance(layer.feed_forward, MixtureOfExperts)
        experts = renamed(expert_slots(layer.feed_forward, weights.feed_forward), {"mlp.": "mixer."})
        latents = {"fc1": weights.feed_forward.latent_down, "fc2": weights.feed_forward.latent_up}
        experts |= {
            f"mixer.{name}_latent_proj.weight": ParameterSlot(linear.weight)
            for name, linear in latents.items()
            if linear is not None
        }
        yield {"norm.weight": ParameterSlot(weights.feed_forward_norm)} | experts


FAMILY = Family(("NemotronHForCausalLM",), ("nemotron_h",), _parse, _slots)
