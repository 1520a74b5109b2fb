"""K-EXAONE: the attention of EXAONE 4, and experts with the router of DeepSeek-V3."""

from tandem.engine.config.model import MixtureOfExperts, ModelSpec
from tandem.engine.models.families.dense.exaone4 import EXAONE_DEFAULTS, exaone_layers
from tandem.engine.models.families.family import (
    Family,
    Json,
    make_model,
    parse_dense_layers,
    parse_expert_count,
    parse_sigmoid_router,
    with_dense,
)
from tandem.engine.models.parameters import Parameters
from tandem.engine.models.slots import ParameterSlot, renamed, standard_slots

_DEFAULTS = {"routed_scaling_factor": 2.5, "num_shared_experts": 1, "num_experts": 64, "num_experts_per_tok": 8}
"""The defaults of transformers for fields that config.json may leave out."""


def _parse(given: Json) -> ModelSpec:
    config = EXAONE_DEFAULTS | _DEFAULTS | dict(given)
    width = int(config["moe_intermediate_size"])
    experts = MixtureOfExperts(
        experts=parse_expert_count(config),
        top_k=int(config["num_experts_per_tok"]),
        width=width,
        router=parse_sigmoid_router(config),
        shared_width=width * int(config["num_shared_experts"]),
    )
    layers = with_dense(config, exaone_layers(config, experts), parse_dense_layers(config, 1))
    return make_model(config, "ExaoneMoeForCausalLM", layers)


def _slots(spec: ModelSpec, parameters: Parameters) -> dict[str, ParameterSlot]:
    return renamed(
        standard_slots(spec, parameters), {".mlp.gate.e_score_correction_bias": ".mlp.e_score_correction_bias"}
    )


FAMILY = Family(("ExaoneMoeForCausalLM",), ("exaone_moe",), _parse, _slots)
