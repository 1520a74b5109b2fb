"""ERNIE 4.5 with experts: softmax scores, and a bias used only to choose the experts."""

from tandem.engine.config.model import ExpertRouter, MixtureOfExperts, ModelSpec
from tandem.engine.kernels.layers import Experts
from tandem.engine.models.families.dense.ernie4_5 import ERNIE_DEFAULTS
from tandem.engine.models.families.family import (
    Family,
    Json,
    grouped_layers,
    make_model,
    parse_shape,
    with_dense,
)
from tandem.engine.models.families.rows import paired_rope_slots
from tandem.engine.models.parameters import Parameters
from tandem.engine.models.slots import ParameterSlot
from tandem.protocol.errors import ModelError

_DEFAULTS = {"moe_num_experts": 64, "moe_k": 6, "moe_num_shared_experts": 2, "moe_intermediate_size": 1536}
"""The defaults of transformers for fields that config.json may leave out."""


def _parse(given: Json) -> ModelSpec:
    config = ERNIE_DEFAULTS | _DEFAULTS | dict(given)
    if config.get("use_bias"):
        raise ModelError("use_bias is not supported for experts.")
    width = int(config["moe_intermediate_size"])
    experts = MixtureOfExperts(
        experts=int(config["moe_num_experts"]),
        top_k=int(config["moe_k"]),
        width=width,
        router=ExpertRouter(choice_bias=True),
        shared_width=width * int(config["moe_num_shared_experts"]),
    )
    number_of_layers = int(config["num_hidden_layers"])
    layers = grouped_layers(config, parse_shape(config), (None,) * number_of_layers, experts)
    dense = [number for number in range(number_of_layers) if not _has_experts(config, number)]
    return make_model(config, "Ernie4_5_MoeForCausalLM", with_dense(config, layers, dense), tied_by_default=True)


def _has_experts(config: Json, number: int) -> bool:
    first, last = int(config.get("moe_layer_start_index", 1)), int(config.get("moe_layer_end_index", -1))
    every = int(config.get("moe_layer_interval") or 1)
    return first <= number and (last == -1 or number <= last) and (number + 1) % every == 0


def _slots(spec: ModelSpec, parameters: Parameters) -> dict[str, ParameterSlot]:
    """Return the slots; the bias of the choice is stored as a matrix of one row."""
    slots = paired_rope_slots(spec, parameters)
    for number, weights in enumerate(parameters.layers):
        if isinstance(weights.feed_forward, Experts):
            assert weights.feed_forward.choice_bias is not None
            prefix = f"model.layers.{number}.mlp."
            del slots[f"{prefix}gate.e_score_correction_bias"]
            slots[f"{prefix}moe_statics.e_score_correction_bias"] = ParameterSlot(
                weights.feed_forward.choice_bias.unsqueeze(0)
            )
    return slots


FAMILY = Family(("Ernie4_5_MoeForCausalLM",), ("ernie4_5_moe",), _parse, _slots)
