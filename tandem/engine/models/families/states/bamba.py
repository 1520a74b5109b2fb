"""Bamba: Mamba-2 layers, and attention that rotates half of each head's dimensions."""

import math
from dataclasses import replace
from typing import Any

from tandem.engine.config.model import ModelSpec
from tandem.engine.config.state_layers import Mamba2
from tandem.engine.models.families.family import Family, Json, grouped_layers, make_model, parse_dense, parse_shape
from tandem.engine.models.families.states.nemotron_h import check_mamba, mamba_slots
from tandem.engine.models.parameters import Parameters, StateParameters
from tandem.engine.models.slots import ParameterSlot, renamed, standard_slots
from tandem.protocol.errors import ModelError

_RENAMED = {
    "model.norm.": "model.final_layernorm.",
    "post_attention_layernorm": "pre_ff_layernorm",
    ".mlp.": ".feed_forward.",
}


def parse_mamba(config: Json) -> Mamba2:
    """Return the Mamba-2 layer of a config.json whose fields begin with `mamba_`.

    Raises ModelError for what is not supported.
    """
    inner = int(config.get("mamba_expand") or 2) * int(config["hidden_size"])
    heads, groups = int(config.get("mamba_n_heads") or 128), int(config.get("mamba_n_groups") or 1)
    dim = config.get("mamba_d_head", "auto")
    shortest, longest = map(_number, config.get("time_step_limit") or (0.0, math.inf))
    mamba = Mamba2(
        heads=heads,
        head_dim=inner // heads if dim in {None, "auto"} else int(dim),
        groups=groups,
        state_dim=int(config.get("mamba_d_state") or 256),
        width=int(config.get("mamba_d_conv") or 4),
        norm_eps=float(config.get("rms_norm_eps") or 1e-5),
        norm_groups=groups,
        convolution_bias=bool(config.get("mamba_conv_bias", True)),
        bias=bool(config.get("mamba_proj_bias")),
        least_step=shortest,
    )
    check_mamba(mamba, config.get("hidden_act", "silu"))
    if mamba.inner != inner:
        raise ModelError(f"{heads} heads of {mamba.head_dim} dimensions are not the {inner} of mamba_expand.")
    if longest != math.inf:
        raise ModelError(f"time_step_limit {[shortest, longest]} is not supported; its maximum must be infinite.")
    return mamba


def _number(value: Any) -> float:
    """Return a number of config.json, in which transformers 5 writes infinity as {"__float__": "Infinity"}."""
    return float(value["__float__"] if isinstance(value, dict) else value)


def mamba_layer_slots(spec: ModelSpec, parameters: Parameters) -> dict[str, ParameterSlot]:
    """Return the slots of all Mamba-2 layers, whose tensors are named `model.layers.N.mamba.`."""
    slots: dict[str, ParameterSlot] = {}
    for number, (layer, weights) in enumerate(zip(spec.layers, parameters.layers, strict=True)):
        if isinstance(layer.attention, Mamba2) and isinstance(weights.attention, StateParameters):
            slots |= mamba_slots(f"model.layers.{number}.mamba.", layer.attention, weights.attention)
    return slots


def _parse(given: Json) -> ModelSpec:
    config = {"rms_norm_eps": 1e-5} | dict(given) | {"partial_rotary_factor": 0.5}
    biased, dense = bool(config.get("attention_bias")), parse_dense(config, bias=bool(config.get("mlp_bias")))
    (attention,) = grouped_layers(config, parse_shape(config), (None,), dense, qkv_bias=biased, output_bias=biased)
    mixed = replace(attention, attention=parse_mamba(config))
    numbers = config.get("attn_layer_indices") or ()
    layers = [attention if number in numbers else mixed for number in range(int(config["num_hidden_layers"]))]
    return make_model(config, "BambaForCausalLM", layers)


def _slots(spec: ModelSpec, parameters: Parameters) -> dict[str, ParameterSlot]:
    return renamed(standard_slots(spec, parameters), _RENAMED) | mamba_layer_slots(spec, parameters)


FAMILY = Family(("BambaForCausalLM",), ("bamba",), _parse, _slots)
