"""GLM-4 and GLM-Z1: norms of block outputs, and rotary embedding of only half of each head."""

from tandem.engine.config.model import ModelSpec
from tandem.engine.models.families.family import (
    Family,
    Json,
    grouped_layers,
    make_model,
    parse_dense,
    parse_shape,
    with_output_norms,
)
from tandem.engine.models.families.rows import paired_rope_slots
from tandem.engine.models.parameters import DenseParameters, Parameters
from tandem.engine.models.slots import ParameterSlot, stacked_gate_up


def _parse(config: Json) -> ModelSpec:
    shape = parse_shape({"partial_rotary_factor": 0.5} | dict(config), head_dim=128)
    layers = grouped_layers(
        config,
        shape,
        (None,) * int(config["num_hidden_layers"]),
        parse_dense(config),
        qkv_bias=bool(config.get("attention_bias", True)),
    )
    return make_model(config, "Glm4ForCausalLM", with_output_norms(layers))


def _slots(spec: ModelSpec, parameters: Parameters) -> dict[str, ParameterSlot]:
    every = paired_rope_slots(spec, parameters).items()
    slots = {name: slot for name, slot in every if "gate_proj" not in name and "up_proj" not in name}
    for number, weights in enumerate(parameters.layers):
        assert isinstance(weights.feed_forward, DenseParameters)
        assert weights.attention_output_norm is not None
        assert weights.feed_forward_output_norm is not None
        prefix = f"model.layers.{number}."
        slots |= {
            f"{prefix}mlp.gate_up_proj.weight": stacked_gate_up(weights.feed_forward),
            f"{prefix}post_self_attn_layernorm.weight": ParameterSlot(weights.attention_output_norm),
            f"{prefix}post_mlp_layernorm.weight": ParameterSlot(weights.feed_forward_output_norm),
        }
    return slots


FAMILY = Family(("Glm4ForCausalLM",), ("glm4",), _parse, _slots)
