"""Cohere 2 (Command R7B, Command A): attention and feed-forward network have one input, which LayerNorm normalizes.

Three of four layers have a window and rotary embedding, the others neither.
"""

from dataclasses import replace

from tandem.engine.config.model import ModelSpec
from tandem.engine.models.families.family import (
    Family,
    Json,
    grouped_layers,
    make_model,
    parse_dense,
    parse_shape,
    parse_window,
    rope_with_windows,
    windows_by_type,
)
from tandem.engine.models.families.rows import paired_rope_slots

_DEFAULTS = {"sliding_window": 4096, "sliding_window_pattern": 4, "logit_scale": 0.0625, "layer_norm_eps": 1e-5}
"""The defaults of transformers for fields that config.json may leave out."""


def _parse(given: Json) -> ModelSpec:
    config = _DEFAULTS | dict(given)
    every = int(config["sliding_window_pattern"])
    windows = windows_by_type(
        config, parse_window(config), lambda number: "sliding_attention" if (number + 1) % every else "full_attention"
    )
    # transformers has no field for the head dimension.
    shape = parse_shape({**config, "head_dim": None})
    biased = bool(config.get("attention_bias"))
    layers = grouped_layers(config, shape, windows, parse_dense(config), qkv_bias=biased, output_bias=biased)
    return make_model(
        config,
        "Cohere2ForCausalLM",
        [replace(layer, parallel=True) for layer in rope_with_windows(layers, windows)],
        norm_eps=float(config["layer_norm_eps"]),
        tied_by_default=True,
        layer_norms=True,
        logits_scale=float(config["logit_scale"]),
    )


FAMILY = Family(("Cohere2ForCausalLM",), ("cohere2",), _parse, paired_rope_slots)
