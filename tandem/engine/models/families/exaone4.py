"""EXAONE 4: the outputs of attention and feed-forward network are normalized instead of their inputs.

If some layers have a window, those without one have no position embedding.
"""

from dataclasses import replace

from tandem.engine.config.model import ModelSpec
from tandem.engine.models.families.exaone_moe import exaone_layers
from tandem.engine.models.families.family import Family, Json, make_model, parse_dense
from tandem.engine.models.families.olmo2 import olmo_slots


def _parse(config: Json) -> ModelSpec:
    layers = exaone_layers(config, parse_dense(config))
    return make_model(
        {"rms_norm_eps": 1e-5} | dict(config),
        "Exaone4ForCausalLM",
        [replace(layer, input_norms=False, output_norms=True) for layer in layers],
    )


FAMILY = Family(("Exaone4ForCausalLM",), ("exaone4",), _parse, olmo_slots)
