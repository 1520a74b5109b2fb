"""OLMo 2: the outputs of attention and feed-forward network are normalized instead of their inputs.

Queries and keys are normalized over all heads together.
"""

from collections.abc import Sequence
from dataclasses import replace

from tandem.engine.config.model import LayerSpec, ModelSpec
from tandem.engine.config.rope import RopeConfig
from tandem.engine.models.families.family import Family, Json, grouped_layers, make_model, parse_dense, parse_shape
from tandem.engine.models.parameters import Parameters
from tandem.engine.models.slots import ParameterSlot, standard_slots


def olmo_layers(config: Json, windows: Sequence[int | None], rope: RopeConfig | None = None) -> list[LayerSpec]:
    """Return the layers of OLMo 2 or 3; `rope` is as in `grouped_layers`."""
    shape, biased = parse_shape(config), bool(config.get("attention_bias"))
    layers = grouped_layers(
        config,
        shape,
        windows,
        parse_dense(config),
        rope=rope,
        qkv_bias=biased,
        output_bias=biased,
        qk_norm=shape.heads * shape.head_dim,
    )
    return [replace(layer, input_norms=False, output_norms=True) for layer in layers]


def olmo_slots(spec: ModelSpec, parameters: Parameters) -> dict[str, ParameterSlot]:
    """Return the slots of a model whose layers have norms of outputs only."""
    slots = standard_slots(spec, parameters)
    for number, weights in enumerate(parameters.layers):
        prefix = f"model.layers.{number}."
        assert weights.attention_output_norm is not None
        assert weights.feed_forward_output_norm is not None
        slots[f"{prefix}post_attention_layernorm.weight"] = ParameterSlot(weights.attention_output_norm)
        slots[f"{prefix}post_feedforward_layernorm.weight"] = ParameterSlot(weights.feed_forward_output_norm)
    return slots


def _parse(config: Json) -> ModelSpec:
    layers = olmo_layers(config, (None,) * int(config["num_hidden_layers"]))
    return make_model({"rms_norm_eps": 1e-5} | dict(config), "Olmo2ForCausalLM", layers)


FAMILY = Family(("Olmo2ForCausalLM",), ("olmo2",), _parse, olmo_slots)
