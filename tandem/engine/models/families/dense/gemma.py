"""Gemma 1: scaled embeddings, and norms that multiply by 1 + weight in float32."""

from tandem.engine.config.model import ModelSpec
from tandem.engine.models.families.dense.gemma2 import gemma_model, plus_one_norms
from tandem.engine.models.families.family import Family, Json, grouped_layers, parse_dense, parse_shape
from tandem.engine.models.parameters import Parameters
from tandem.engine.models.slots import ParameterSlot, standard_slots


def _parse(given: Json) -> ModelSpec:
    # In Gemma's first files, "gelu" names the approximation by tanh, as in transformers.
    config = dict(given) | ({"hidden_act": None} if given.get("hidden_act") == "gelu" else {})
    biased = bool(config.get("attention_bias"))
    layers = grouped_layers(
        config,
        parse_shape(config, head_dim=256),
        (None,) * int(config["num_hidden_layers"]),
        parse_dense(config, activation="gelu_pytorch_tanh"),
        qkv_bias=biased,
        output_bias=biased,
    )
    return gemma_model(config, "GemmaForCausalLM", layers)


def _slots(spec: ModelSpec, parameters: Parameters) -> dict[str, ParameterSlot]:
    return plus_one_norms(standard_slots(spec, parameters))


FAMILY = Family(("GemmaForCausalLM",), ("gemma",), _parse, _slots)
