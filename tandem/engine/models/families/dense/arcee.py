"""Arcee (AFM): Llama with a feed-forward network that has no gate."""

from tandem.engine.config.model import ModelSpec
from tandem.engine.models.families.family import Family, Json, grouped_layers, make_model, parse_shape, parse_ungated


def _parse(config: Json) -> ModelSpec:
    biased = bool(config.get("attention_bias"))
    layers = grouped_layers(
        config,
        parse_shape(config),
        (None,) * int(config["num_hidden_layers"]),
        parse_ungated(config),
        qkv_bias=biased,
        output_bias=biased,
    )
    return make_model({"rms_norm_eps": 1e-5} | dict(config), "ArceeForCausalLM", layers)


FAMILY = Family(("ArceeForCausalLM",), ("arcee",), _parse)
