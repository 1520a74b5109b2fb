"""The text of Qwen3.5 with experts, all of which a checkpoint stores in one tensor."""

from tandem.engine.config.model import ModelSpec
from tandem.engine.kernels.layers import Experts
from tandem.engine.models.families.family import Family, Json, make_model
from tandem.engine.models.families.states.qwen3_5 import separate_slots
from tandem.engine.models.families.states.qwen3_next import QWEN_MTP, gated_experts, gated_layers
from tandem.engine.models.parameters import Parameters
from tandem.engine.models.slots import ParameterSlot


def _parse(config: Json) -> ModelSpec:
    layers = gated_layers(config, gated_experts(config))
    return make_model(config, "Qwen3_5MoeForCausalLM", layers, wide_norms=True)


def _slots(spec: ModelSpec, parameters: Parameters) -> dict[str, ParameterSlot]:
    slots = {name: slot for name, slot in separate_slots(spec, parameters).items() if ".mlp.experts." not in name}
    for number, weights in enumerate(parameters.layers):
        experts, prefix = weights.feed_forward, f"model.layers.{number}.mlp.experts."
        assert isinstance(experts, Experts)
        rows = experts.gate_up.shape[1] // 2
        slots[f"{prefix}gate_up_proj"] = ParameterSlot(experts.gate_up, stacked=(rows, rows))
        slots[f"{prefix}down_proj"] = ParameterSlot(experts.down)
    return slots


FAMILY = Family(
    ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"), ("qwen3_5_moe_text",), _parse, _slots, QWEN_MTP
)
