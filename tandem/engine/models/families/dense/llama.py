"""Llama 2 and 3, SmolLM2, and other models that are published in Llama's format."""

from tandem.engine.config.model import ModelSpec
from tandem.engine.models.families.family import Family, Json, grouped_layers, make_model, parse_dense, parse_shape


def _parse(config: Json) -> ModelSpec:
    biased = bool(config.get("attention_bias"))
    layers = grouped_layers(
        config,
        parse_shape(config),
        (None,) * int(config["num_hidden_layers"]),
        parse_dense(config, bias=bool(config.get("mlp_bias"))),
        qkv_bias=biased,
        output_bias=biased,
    )
    return make_model(config, "LlamaForCausalLM", layers)


FAMILY = Family(("LlamaForCausalLM",), ("llama",), _parse)
