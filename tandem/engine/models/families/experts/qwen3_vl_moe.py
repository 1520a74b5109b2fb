"""The text of Qwen3-VL with experts: Qwen3-MoE, whose experts a checkpoint stores transposed and in one tensor."""

from torch import Tensor

from tandem.engine.config.model import ModelSpec
from tandem.engine.kernels.layers import Experts
from tandem.engine.models.families.experts.qwen3_moe import qwen3_moe_model
from tandem.engine.models.families.family import Family, Json
from tandem.engine.models.parameters import Parameters
from tandem.engine.models.slots import ParameterSlot, standard_slots


def _parse(config: Json) -> ModelSpec:
    return qwen3_moe_model({**config, "norm_topk_prob": True}, "Qwen3VLMoeForConditionalGeneration")


def _slots(spec: ModelSpec, parameters: Parameters) -> dict[str, ParameterSlot]:
    slots = {name: slot for name, slot in standard_slots(spec, parameters).items() if ".mlp.experts." not in name}
    for number, weights in enumerate(parameters.layers):
        experts = weights.feed_forward
        if not isinstance(experts, Experts):
            continue
        count, inner, hidden = experts.gate_up.shape
        rows, prefix = inner // 2, f"model.layers.{number}.mlp.experts."
        slots |= {
            f"{prefix}gate_up_proj": ParameterSlot(
                experts.gate_up, _transposed, (count, hidden, inner), stacked=(rows, rows)
            ),
            f"{prefix}down_proj": ParameterSlot(experts.down, _transposed, (count, rows, hidden)),
        }
    return slots


def _transposed(stored: Tensor) -> Tensor:
    return stored.transpose(1, 2)


FAMILY = Family(("Qwen3VLMoeForConditionalGeneration",), ("qwen3_vl_moe_text",), _parse, _slots)
