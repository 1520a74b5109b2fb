"""Gemma 2: caps on scores and logits, norms of block outputs, and a window in every other layer."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from tandem.engine.config.model import LayerSpec, ModelSpec
from tandem.engine.models.families.family import (
    Family,
    Json,
    grouped_layers,
    make_model,
    parse_dense,
    parse_shape,
    parse_softcap,
    parse_window,
    windows_by_type,
    with_output_norms,
)
from tandem.engine.models.parameters import Parameters
from tandem.engine.models.slots import ParameterSlot, renamed, standard_slots


def gemma_model(config: Json, architecture: str, layers: Sequence[LayerSpec]) -> ModelSpec:
    """Return a model whose embeddings are scaled, and whose norms multiply by 1 + weight in float32."""
    return make_model(
        config,
        architecture,
        layers,
        tied_by_default=True,
        wide_norms=True,
        embedding_scale=float(int(config["hidden_size"]) ** 0.5),
        logits_softcap=parse_softcap(config, "final_logit_softcapping"),
    )


def gemma_slots(spec: ModelSpec, parameters: Parameters) -> dict[str, ParameterSlot]:
    """Return the slots of a model with output norms; its checkpoints store norm weights minus 1."""
    return plus_one_norms(output_norm_slots(spec, parameters))


def output_norm_slots(spec: ModelSpec, parameters: Parameters) -> dict[str, ParameterSlot]:
    """Return the slots of a model with output norms, which have the names of Gemma's checkpoints."""
    slots = standard_slots(spec, parameters)
    named = renamed(slots, {"post_attention_layernorm": "pre_feedforward_layernorm"})
    for number, weights in enumerate(parameters.layers):
        prefix = f"model.layers.{number}."
        assert weights.attention_output_norm is not None
        assert weights.feed_forward_output_norm is not None
        named[f"{prefix}post_attention_layernorm.weight"] = ParameterSlot(weights.attention_output_norm)
        named[f"{prefix}post_feedforward_layernorm.weight"] = ParameterSlot(weights.feed_forward_output_norm)
    return named


def plus_one_norms(slots: dict[str, ParameterSlot]) -> dict[str, ParameterSlot]:
    """Return the slots of a checkpoint that stores the weights of its norms minus 1."""
    return {
        name: replace(slot, transform=_plus_one) if name.endswith("norm.weight") else slot
        for name, slot in slots.items()
    }


def _plus_one(stored: Tensor) -> Tensor:
    return stored + 1


def _parse(config: Json) -> ModelSpec:
    shape = parse_shape(config, head_dim=256, scale=float(config.get("query_pre_attn_scalar") or 256) ** -0.5)
    shape = replace(shape, softcap=parse_softcap(config, "attn_logit_softcapping", 50.0))
    windows = windows_by_type(
        config, parse_window(config), lambda number: "full_attention" if number % 2 else "sliding_attention"
    )
    biased = bool(config.get("attention_bias"))
    dense = parse_dense(config, activation="gelu_pytorch_tanh")
    layers = with_output_norms(grouped_layers(config, shape, windows, dense, qkv_bias=biased, output_bias=biased))
    return gemma_model({"final_logit_softcapping": 30.0} | dict(config), "Gemma2ForCausalLM", layers)


FAMILY = Family(("Gemma2ForCausalLM",), ("gemma2",), _parse, gemma_slots)
