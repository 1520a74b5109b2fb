"""Qwen3 and the text of Qwen3-VL: the queries and keys of each head are normalized."""

from tandem.engine.config.model import ModelSpec
from tandem.engine.models.families.dense.qwen2 import qwen_windows
from tandem.engine.models.families.family import Family, Json, grouped_layers, make_model, parse_dense, parse_shape

HEAD_DIM = 128
"""The head dimension if config.json does not have it, as in transformers."""


def _parse(config: Json) -> ModelSpec:
    shape, biased = parse_shape(config, head_dim=HEAD_DIM), bool(config.get("attention_bias"))
    layers = grouped_layers(
        config,
        shape,
        qwen_windows(config),
        parse_dense(config),
        qkv_bias=biased,
        output_bias=biased,
        qk_norm=shape.head_dim,
    )
    return make_model(config, "Qwen3ForCausalLM", layers)


FAMILY = Family(("Qwen3ForCausalLM",), ("qwen3", "qwen3_vl_text"), _parse)
