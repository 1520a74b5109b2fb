"""Granite with experts and a shared expert: checkpoints like those of Granite 4, without Mamba-2."""

from tandem.engine.config.model import ModelSpec
from tandem.engine.models.families.dense.granite import granite_model
from tandem.engine.models.families.experts.granite_moe import granite_experts
from tandem.engine.models.families.family import Family, Json, check_sizes, parse_expert_count
from tandem.engine.models.families.states import granitemoehybrid


def _parse(config: Json) -> ModelSpec:
    shared = int(config.get("shared_intermediate_size") or 0)
    check_sizes(shared_intermediate_size=shared)
    experts = granite_experts(config, parse_expert_count(config), shared)
    return granite_model(config, "GraniteMoeSharedForCausalLM", experts)


FAMILY = Family(("GraniteMoeSharedForCausalLM",), ("granitemoeshared",), _parse, granitemoehybrid.FAMILY.slots)
