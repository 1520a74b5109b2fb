"""ERNIE 4.5, the dense models: Llama's layers, and checkpoints with the rows of rotated pairs next to each other."""

from tandem.engine.config.model import ModelSpec
from tandem.engine.models.families.family import Family, Json, grouped_layers, make_model, parse_dense, parse_shape
from tandem.engine.models.families.rows import paired_rope_slots

ERNIE_DEFAULTS = {"rope_theta": 500000.0, "rms_norm_eps": 1e-5}
"""The defaults of transformers for fields that config.json may leave out."""


def _parse(given: Json) -> ModelSpec:
    config = ERNIE_DEFAULTS | dict(given)
    biased = bool(config.get("use_bias"))
    layers = grouped_layers(
        config,
        parse_shape(config, head_dim=128),
        (None,) * int(config["num_hidden_layers"]),
        parse_dense(config, bias=biased),
        qkv_bias=biased,
        output_bias=biased,
    )
    return make_model(config, "Ernie4_5ForCausalLM", layers, tied_by_default=True)


FAMILY = Family(("Ernie4_5ForCausalLM",), ("ernie4_5",), _parse, paired_rope_slots)
