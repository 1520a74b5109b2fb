"""OLMo 3: OLMo 2 with windows in most layers, whose rotary embedding is not scaled."""

from tandem.engine.config.model import ModelSpec
from tandem.engine.models.families.dense.olmo2 import olmo_layers, olmo_slots
from tandem.engine.models.families.family import (
    Family,
    Json,
    make_model,
    parse_window,
    ropes_by_type,
    windows_by_type,
    with_window_rope,
)

_DEFAULTS = {"sliding_window": 4096, "rms_norm_eps": 1e-5}
"""The defaults of transformers for fields that config.json may leave out."""
_THETA = 500_000.0
_EVERY = 4
"""Every fourth layer has no window, if config.json does not name the layers' types."""


def _parse(given: Json) -> ModelSpec:
    config = _DEFAULTS | dict(given)
    windows = windows_by_type(
        config,
        parse_window(config),
        lambda number: "sliding_attention" if (number + 1) % _EVERY else "full_attention",
    )
    # As in transformers, `rope_theta` is that of the layers without a window.
    full, local = ropes_by_type(config, _THETA, _THETA)
    layers = [with_window_rope(layer, local) for layer in olmo_layers(config, windows, full)]
    return make_model(config, "Olmo3ForCausalLM", layers)


FAMILY = Family(("Olmo3ForCausalLM",), ("olmo3",), _parse, olmo_slots)
