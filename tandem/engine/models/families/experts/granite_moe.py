"""Granite 3 with a mixture of experts in every layer; a checkpoint stores all experts of a layer in one tensor."""

from tandem.engine.config.model import ExpertRouter, MixtureOfExperts, ModelSpec
from tandem.engine.kernels.layers import Experts
from tandem.engine.models.families.dense.granite import granite_model
from tandem.engine.models.families.family import Family, Json, parse_expert_count
from tandem.engine.models.parameters import Parameters
from tandem.engine.models.slots import ParameterSlot, standard_slots


def granite_experts(config: Json, count: int, shared_width: int = 0) -> MixtureOfExperts:
    """Return Granite's mixture of `count` experts, and a shared one if `shared_width` is not 0."""
    return MixtureOfExperts(
        experts=count,
        top_k=int(config["num_experts_per_tok"]),
        width=int(config["intermediate_size"]),
        router=ExpertRouter(score="softmax_of_top_k"),
        shared_width=shared_width,
    )


def granite_expert_slots(number: int, experts: Experts) -> dict[str, ParameterSlot]:
    """Return the slots of the router and the experts of layer `number`, without the shared expert."""
    rows = experts.gate_up.shape[1] // 2
    prefix = f"model.layers.{number}.block_sparse_moe."
    return {
        f"{prefix}router.layer.weight": ParameterSlot(experts.router),
        f"{prefix}input_linear.weight": ParameterSlot(experts.gate_up, stacked=(rows, rows)),
        f"{prefix}output_linear.weight": ParameterSlot(experts.down),
    }


def _parse(config: Json) -> ModelSpec:
    experts = granite_experts(config, parse_expert_count(config))
    return granite_model(config, "GraniteMoeForCausalLM", experts)


def _slots(spec: ModelSpec, parameters: Parameters) -> dict[str, ParameterSlot]:
    slots = {name: slot for name, slot in standard_slots(spec, parameters).items() if ".mlp." not in name}
    for number, weights in enumerate(parameters.layers):
        experts = weights.feed_forward
        assert isinstance(experts, Experts)
        slots |= granite_expert_slots(number, experts)
    return slots


FAMILY = Family(("GraniteMoeForCausalLM",), ("granitemoe",), _parse, _slots)
