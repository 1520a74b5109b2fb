"""Qwen2 and Qwen2.5, and the text of Qwen2-VL and Qwen2.5-VL.

q, k and v have biases, and the upper layers may have a sliding window.
"""

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
)

_FULL_LAYERS = 28
"""The number of lower layers without a window if config.json does not have it, as in transformers."""


def qwen_windows(config: Json) -> tuple[int | None, ...]:
    """Return each layer's sliding window, None for full attention; all are None unless `use_sliding_window` is set."""
    if not config.get("use_sliding_window"):
        return (None,) * int(config["num_hidden_layers"])
    window = parse_window({"sliding_window": 4096} | dict(config))
    first = int(config.get("max_window_layers", _FULL_LAYERS))
    return windows_by_type(
        config, window, lambda number: "full_attention" if number < first or window is None else "sliding_attention"
    )


def _parse(config: Json) -> ModelSpec:
    layers = grouped_layers(config, parse_shape(config), qwen_windows(config), parse_dense(config), qkv_bias=True)
    return make_model(config, "Qwen2ForCausalLM", layers)


FAMILY = Family(
    ("Qwen2ForCausalLM", "Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
    ("qwen2", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"),
    _parse,
)
"""Published files of Qwen2-VL and Qwen2.5-VL have the fields of the text model outside of a `text_config`."""
