"""Granite 3 with a mixture of experts in every layer; a checkpoint stores all experts of a layer in one tensor."""

from tandem.engine.config.model import ExpertRouter, MixtureOfExperts, ModelSpec
from tandem.engine.kernels.layers import Experts
from tandem.engine.models.families.dense.granite import granite_model
from tandem.engine.models.families.family import Family, Json, parse_expert_count
from tandem.engine.models.parameters import Parameters, ParameterSlot, standard_slots


def _parse(config: Json) -> ModelSpec:
    experts = MixtureOfExperts(
        experts=parse_expert_count(config),
        top_k=int(config["num_experts_per_tok"]),
        width=int(config["intermediate_size"]),
        router=ExpertRouter(score="softmax_of_top_k"),
    )
    return granite_model(config, "GraniteMoeForCausalLM", experts)


def _slots(spec: ModelSpec, parameters: Parameters) -> dict[str, ParameterSlot]:
    slots = {name: slot for name, slot in standard_slots(spec, parameters).items() if ".mlp." not in name}
    for number, weights in enumerate(parameters.layers):
        experts = weights.feed_forward
        assert isinstance(experts, Experts)
        rows = experts.gate_up.shape[1] // 2
        prefix = f"model.layers.{number}.block_sparse_moe."
        slots |= {
            f"{prefix}router.layer.weight": ParameterSlot(experts.router),
            f"{prefix}input_linear.weight": ParameterSlot(experts.gate_up, stacked=(rows, rows)),
            f"{prefix}output_linear.weight": ParameterSlot(experts.down),
        }
    return slots


FAMILY = Family(("GraniteMoeForCausalLM",), ("granitemoe",), _parse, _slots)
