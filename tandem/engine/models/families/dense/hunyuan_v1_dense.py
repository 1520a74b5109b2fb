"""Hunyuan, the dense models: queries and keys are normalized after rotation."""

from dataclasses import replace

from tandem.engine.config.model import FeedForward, GroupedQueryAttention, LayerSpec, ModelSpec
from tandem.engine.config.rope import RopeConfig, parse_rope
from tandem.engine.models.families.family import Family, Json, grouped_layers, make_model, parse_dense, parse_shape
from tandem.engine.models.parameters import Parameters
from tandem.engine.models.slots import ParameterSlot, renamed, standard_slots


def hunyuan_layers(config: Json, feed_forward: FeedForward) -> list[LayerSpec]:
    """Return the layers of a Hunyuan model, which have the same feed-forward network."""
    shape, biased = parse_shape(config), bool(config.get("attention_bias"))
    layers = grouped_layers(
        config,
        shape,
        (None,) * int(config["num_hidden_layers"]),
        feed_forward,
        rope=_rope(config, shape.head_dim),
        qkv_bias=biased,
        output_bias=biased,
        qk_norm=shape.head_dim,
    )
    return [_normed_after_rope(layer) for layer in layers]


def hunyuan_slots(spec: ModelSpec, parameters: Parameters) -> dict[str, ParameterSlot]:
    """Return the slots of a model whose norms of queries and keys have Hunyuan's names."""
    return renamed(standard_slots(spec, parameters), {".q_norm.": ".query_layernorm.", ".k_norm.": ".key_layernorm."})


def _normed_after_rope(layer: LayerSpec) -> LayerSpec:
    assert isinstance(layer.attention, GroupedQueryAttention)
    return replace(layer, attention=replace(layer.attention, norm_after_rope=True))


def _rope(config: Json, head_dim: int) -> RopeConfig:
    """Return the RoPE; with `dynamic` scaling by a fixed `alpha`, theta is multiplied by alpha^(d / (d - 2))."""
    settings = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    alpha = settings.get("alpha")
    if (settings.get("rope_type") or settings.get("type")) != "dynamic" or not alpha:
        return parse_rope(config)
    rope = parse_rope(config, settings | {"rope_type": "default"})
    return replace(rope, theta=rope.theta * float(alpha) ** (head_dim / (head_dim - 2)))


def _parse(config: Json) -> ModelSpec:
    return make_model(config, "HunYuanDenseV1ForCausalLM", hunyuan_layers(config, parse_dense(config)))


FAMILY = Family(("HunYuanDenseV1ForCausalLM",), ("hunyuan_v1_dense",), _parse, hunyuan_slots)
