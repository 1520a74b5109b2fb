"""Granite with experts and a shared expert: checkpoints like those of Granite 4, without Mamba-2."""

from tandem.engine.config.model import ExpertRouter, MixtureOfExperts, ModelSpec
from tandem.engine.models.families.dense.granite import granite_model
from tandem.engine.models.families.family import Family, Json, check_sizes, parse_expert_count
from tandem.engine.models.families.states import granitemoehybrid


def _parse(config: Json) -> ModelSpec:
    shared = int(config.get("shared_intermediate_size") or 0)
    check_sizes(shared_intermediate_size=shared)
    experts = MixtureOfExperts(
        experts=parse_expert_count(config),
        top_k=int(config["num_experts_per_tok"]),
        width=int(config["intermediate_size"]),
        router=ExpertRouter(score="softmax_of_top_k"),
        shared_width=shared,
    )
    return granite_model(config, "GraniteMoeSharedForCausalLM", experts)


FAMILY = Family(("GraniteMoeSharedForCausalLM",), ("granitemoeshared",), _parse, granitemoehybrid.FAMILY.slots)
