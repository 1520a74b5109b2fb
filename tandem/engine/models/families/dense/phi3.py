"""Phi-3, Phi-3.5 and Phi-4, whose checkpoints store q, k and v as one matrix, and gate and up as another."""

from typing import Any

from tandem.engine.config.model import GroupedQueryAttention, ModelSpec
from tandem.engine.config.rope import parse_rope
from tandem.engine.models.families.family import (
    Family,
    Json,
    grouped_layers,
    make_model,
    parse_dense,
    parse_shape,
    parse_window,
)
from tandem.engine.models.parameters import AttentionParameters, DenseParameters, Parameters
from tandem.engine.models.slots import ParameterSlot, stacked_gate_up, standard_slots

_APART = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


def _parse(config: Json) -> ModelSpec:
    windows = (parse_window(config),) * int(config["num_hidden_layers"])
    layers = grouped_layers(
        config, parse_shape(config), windows, parse_dense(config), rope=parse_rope(config, _scaling(config))
    )
    return make_model(config, "Phi3ForCausalLM", layers)


def _scaling(config: Json) -> dict[str, Any]:
    """Return the RoPE settings; the first files name LongRoPE `su` or `yarn`."""
    settings = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = settings.get("rope_type") or settings.get("type")
    return settings | ({"rope_type": "longrope"} if kind in ("su", "yarn") else {})


def _slots(spec: ModelSpec, parameters: Parameters) -> dict[str, ParameterSlot]:
    every = standard_slots(spec, parameters).items()
    slots = {name: slot for name, slot in every if not any(part in name for part in _APART)}
    for number, (layer, weights) in enumerate(zip(spec.layers, parameters.layers, strict=True)):
        assert isinstance(layer.attention, GroupedQueryAttention)
        assert isinstance(weights.attention, AttentionParameters)
        assert isinstance(weights.feed_forward, DenseParameters)
        prefix = f"model.layers.{number}."
        slots[f"{prefix}self_attn.qkv_proj.weight"] = ParameterSlot(
            weights.attention.qkv, stacked=layer.attention.shape.qkv_rows
        )
        slots[f"{prefix}mlp.gate_up_proj.weight"] = stacked_gate_up(weights.feed_forward)
    return slots


FAMILY = Family(("Phi3ForCausalLM",), ("phi3",), _parse, _slots)
