"""Seed-OSS: Llama with biases of q, k and v, and heads of 128 dimensions."""

from tandem.engine.config.model import ModelSpec
from tandem.engine.models.families.family import Family, Json, grouped_layers, make_model, parse_dense, parse_shape


def _parse(config: Json) -> ModelSpec:
    layers = grouped_layers(
        config,
        parse_shape(config, head_dim=128),
        (None,) * int(config["num_hidden_layers"]),
        parse_dense(config, bias=bool(config.get("mlp_bias"))),
        qkv_bias=bool(config.get("attention_bias", True)),
        output_bias=bool(config.get("attention_out_bias")),
    )
    return make_model(config, "SeedOssForCausalLM", layers)


FAMILY = Family(("SeedOssForCausalLM",), ("seed_oss",), _parse)
