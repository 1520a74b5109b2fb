"""The text of Qwen3.5: Qwen3-Next with dense feed-forward networks, whose projections are stored separately."""

from tandem.engine.config.model import ModelSpec
from tandem.engine.models.families.family import Family, Json, make_model, parse_dense
from tandem.engine.models.families.states.qwen3_next import QWEN_MTP, delta_slots, delta_weights, gated_layers
from tandem.engine.models.parameters import Parameters
from tandem.engine.models.slots import ParameterSlot


def separate_slots(spec: ModelSpec, parameters: Parameters) -> dict[str, ParameterSlot]:
    """Return the slots of a checkpoint with a tensor each for q, k and v, for the gate, the step and the decay."""
    slots = delta_slots(spec, parameters)
    for number, layer, weights in delta_weights(spec, parameters):
        prefix, (q, k, v, *others) = f"model.layers.{number}.linear_attn.", layer.projected
        joined, gate, step, decay = weights.projections.split_with_sizes((q + k + v, *others))
        slots |= {
            f"{prefix}in_proj_qkv.weight": ParameterSlot(joined, stacked=(q, k, v)),
            f"{prefix}in_proj_z.weight": ParameterSlot(gate),
            f"{prefix}in_proj_b.weight": ParameterSlot(step),
            f"{prefix}in_proj_a.weight": ParameterSlot(decay),
        }
    return slots


def _parse(config: Json) -> ModelSpec:
    return make_model(config, "Qwen3_5ForCausalLM", gated_layers(config, parse_dense(config)), wide_norms=True)


FAMILY = Family(
    ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"), ("qwen3_5_text",), _parse, separate_slots, QWEN_MTP
)
