"""EXAONE 4: the outputs of attention and feed-forward network are normalized instead of their inputs.

Layers with a window have rotary embedding; the others have it only if no layer has a window.
"""

from dataclasses import replace

from tandem.engine.config.model import FeedForward, LayerSpec, ModelSpec
from tandem.engine.models.families.dense.olmo2 import olmo_slots
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

EXAONE_DEFAULTS = {"sliding_window": 4096, "sliding_window_pattern": 4, "rms_norm_eps": 1e-5}
"""The defaults of transformers for fields that config.json may leave out."""


def exaone_layers(config: Json, feed_forward: FeedForward) -> list[LayerSpec]:
    """Return layers with the attention of EXAONE 4; `config` has the fields of `EXAONE_DEFAULTS`."""
    window, pattern = parse_window(config), config["sliding_window_pattern"]
    # A pattern is a number of layers, of which the last has no window, or as many letters, for example LLLG.
    every = len(pattern) if isinstance(pattern, str) else int(pattern or 0)
    windows = windows_by_type(
        config,
        window,
        lambda number: "sliding_attention" if window and every and (number + 1) % every else "full_attention",
    )
    shape = parse_shape(config)
    layers = grouped_layers(config, shape, windows, feed_forward, qk_norm=shape.head_dim)
    return layers if window is None else rope_with_windows(layers, windows)


def _parse(given: Json) -> ModelSpec:
    config = EXAONE_DEFAULTS | dict(given)
    layers = exaone_layers(config, parse_dense(config))
    output_normed = [replace(layer, input_norms=False, output_norms=True) for layer in layers]
    return make_model(config, "Exaone4ForCausalLM", output_normed)


FAMILY = Family(("Exaone4ForCausalLM",), ("exaone4",), _parse, olmo_slots)
