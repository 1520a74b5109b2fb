"""Gemma 3, text only: five layers with a window, which have their own RoPE, are followed by one without a window."""

from dataclasses import replace

from tandem.engine.config.model import ModelSpec
from tandem.engine.models.families.dense.gemma2 import gemma_model, gemma_slots
from tandem.engine.models.families.family import (
    Family,
    Json,
    grouped_layers,
    parse_dense,
    parse_shape,
    parse_softcap,
    parse_window,
    ropes_by_type,
    windows_by_type,
    with_output_norms,
    with_window_rope,
)

_DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}
"""The defaults of transformers for fields that published config.json files leave out."""
_GLOBAL_THETA, _LOCAL_THETA = 1e6, 1e4
"""The RoPE thetas of layers without and with a window, if config.json has none."""


def _parse(given: Json) -> ModelSpec:
    config = _DEFAULTS | dict(given)
    shape = parse_shape(config, scale=float(config.get("query_pre_attn_scalar") or 256) ** -0.5)
    shape = replace(shape, softcap=parse_softcap(config, "attn_logit_softcapping"))
    every = int(config.get("sliding_window_pattern") or 6)
    windows = windows_by_type(
        config,
        parse_window(config),
        lambda number: "sliding_attention" if (number + 1) % every else "full_attention",
    )
    full, local = ropes_by_type(config, _GLOBAL_THETA, float(config.get("rope_local_base_freq") or _LOCAL_THETA))
    biased = bool(config.get("attention_bias"))
    dense = parse_dense(config, activation="gelu_pytorch_tanh")
    layers = grouped_layers(
        config, shape, windows, dense, rope=full, qkv_bias=biased, output_bias=biased, qk_norm=shape.head_dim
    )
    return gemma_model(
        config, "Gemma3ForCausalLM", with_output_norms([with_window_rope(layer, local) for layer in layers])
    )


FAMILY = Family(("Gemma3ForCausalLM",), ("gemma3_text",), _parse, gemma_slots)
