"""Ministral 3, also as the text of Mistral 3: YaRN, and queries that are scaled by their position."""

from dataclasses import replace

from tandem.engine.config.model import GroupedQueryAttention, LayerSpec, ModelSpec, QueryScaling
from tandem.engine.models.families.family import (
    Family,
    Json,
    grouped_layers,
    make_model,
    parse_dense,
    parse_shape,
    parse_window,
)

_ROPE = {
    "type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""The RoPE of a config.json that has none, as in transformers."""


def _parse(given: Json) -> ModelSpec:
    scaled = given.get("rope_parameters") or given.get("rope_scaling")
    config = dict(given) if scaled else dict(given) | {"rope_parameters": _ROPE}
    windows = (parse_window(config),) * int(config["num_hidden_layers"])
    layers = grouped_layers(config, parse_shape(config, head_dim=128), windows, parse_dense(config))
    scaling = parse_query_scaling(config)
    return make_model(config, "Ministral3ForCausalLM", [_with_scaling(layer, scaling) for layer in layers])


def parse_query_scaling(config: Json) -> QueryScaling | None:
    """Return the scaling of queries by their position; None without one."""
    settings = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    beta, context = settings.get("llama_4_scaling_beta"), settings.get("original_max_position_embeddings")
    return QueryScaling(float(beta), int(context or config["max_position_embeddings"])) if beta else None


def _with_scaling(layer: LayerSpec, scaling: QueryScaling | None) -> LayerSpec:
    assert isinstance(layer.attention, GroupedQueryAttention)
    return replace(layer, attention=replace(layer.attention, query_scaling=scaling))


FAMILY = Family(("Ministral3ForCausalLM",), ("ministral3",), _parse)
