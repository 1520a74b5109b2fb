"""Mistral 7B and its successors with the same architecture, including Ministral, in which some layers have a window."""

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

_WINDOW = 4096
"""The sliding window if config.json does not have it, as in transformers."""


def _parse(config: Json) -> ModelSpec:
    window = parse_window({"sliding_window": _WINDOW} | dict(config))
    default = "full_attention" if window is None else "sliding_attention"
    windows = windows_by_type(config, window, lambda _: default)
    layers = grouped_layers(config, parse_shape(config), windows, parse_dense(config))
    return make_model(config, "MistralForCausalLM", layers)


FAMILY = Family(("MistralForCausalLM", "MinistralForCausalLM"), ("mistral", "ministral"), _parse)
