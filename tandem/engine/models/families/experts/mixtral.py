"""Mixtral 8x7B and 8x22B: a mixture of experts in every layer."""

from tandem.engine.config.model import ExpertRouter, MixtureOfExperts, ModelSpec
from tandem.engine.models.families.family import (
    Family,
    Json,
    grouped_layers,
    make_model,
    parse_expert_count,
    parse_shape,
    parse_window,
)
from tandem.engine.models.parameters import Parameters
from tandem.engine.models.slots import ParameterSlot, renamed, standard_slots

_NAMES = {
    ".mlp.gate.": ".block_sparse_moe.gate.",
    ".gate_proj.": ".w1.",
    ".down_proj.": ".w2.",
    ".up_proj.": ".w3.",
}


def _parse(config: Json) -> ModelSpec:
    experts = MixtureOfExperts(
        experts=parse_expert_count(config),
        top_k=int(config["num_experts_per_tok"]),
        width=int(config["intermediate_size"]),
        router=ExpertRouter(),
    )
    windows = (parse_window(config),) * int(config["num_hidden_layers"])
    return make_model(config, "MixtralForCausalLM", grouped_layers(config, parse_shape(config), windows, experts))


def mixtral_slots(spec: ModelSpec, parameters: Parameters) -> dict[str, ParameterSlot]:
    """Return the slots of a model with the names of Mixtral's checkpoints."""
    return renamed(renamed(standard_slots(spec, parameters), _NAMES), {".mlp.experts.": ".block_sparse_moe.experts."})


FAMILY = Family(("MixtralForCausalLM",), ("mixtral",), _parse, mixtral_slots)
