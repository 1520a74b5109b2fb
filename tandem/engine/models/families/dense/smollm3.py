"""SmolLM3: every fourth layer has no rotary embedding."""

from tandem.engine.config.model import ModelSpec
from tandem.engine.models.families.family import (
    Family,
    Json,
    grouped_layers,
    make_model,
    parse_dense,
    parse_shape,
    parse_window,
    windows_by_type,
    without_rope,
)

_DEFAULTS = {"rope_theta": 2_000_000.0, "tie_word_embeddings": True}
"""The defaults of transformers for fields that published config.json files may leave out."""


def _parse(given: Json) -> ModelSpec:
    config = _DEFAULTS | dict(given)
    every = int(config.get("no_rope_layer_interval") or 4)
    count = int(config["num_hidden_layers"])
    rotated = config.get("no_rope_layers") or [(number + 1) % every for number in range(count)]
    window = parse_window(config) if config.get("use_sliding_window") else None
    windows = windows_by_type(
        config,
        window,
        lambda number: "full_attention" if window is None or rotated[number] else "sliding_attention",
    )
    biased = bool(config.get("attention_bias"))
    dense = parse_dense(config, bias=bool(config.get("mlp_bias")))
    layers = grouped_layers(config, parse_shape(config), windows, dense, qkv_bias=biased, output_bias=biased)
    return make_model(
        config,
        "SmolLM3ForCausalLM",
        [layer if rotated[number] else without_rope(layer) for number, layer in enumerate(layers)],
    )


FAMILY = Family(("SmolLM3ForCausalLM",), ("smollm3",), _parse)
