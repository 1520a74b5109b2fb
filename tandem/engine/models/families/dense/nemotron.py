"""Nemotron, Minitron: LayerNorm with biases, a feed-forward network without a gate, and partly rotated heads."""

from tandem.engine.config.model import ModelSpec
from tandem.engine.models.families.dense.gemma2 import plus_one_norms
from tandem.engine.models.families.family import Family, Json, grouped_layers, make_model, parse_shape, parse_ungated
from tandem.engine.models.parameters import Parameters
from tandem.engine.models.slots import ParameterSlot, standard_slots


def _parse(config: Json) -> ModelSpec:
    biased = bool(config.get("attention_bias"))
    layers = grouped_layers(
        config,
        parse_shape({"partial_rotary_factor": 0.5} | dict(config)),
        (None,) * int(config["num_hidden_layers"]),
        parse_ungated(config),
        qkv_bias=biased,
        output_bias=biased,
    )
    norm_eps = float(config.get("norm_eps", 1e-5))
    return make_model(config, "NemotronForCausalLM", layers, norm_eps=norm_eps, layer_norms=True, norm_bias=True)


def _slots(spec: ModelSpec, parameters: Parameters) -> dict[str, ParameterSlot]:
    return plus_one_norms(standard_slots(spec, parameters))


FAMILY = Family(("NemotronForCausalLM",), ("nemotron",), _parse, _slots)
