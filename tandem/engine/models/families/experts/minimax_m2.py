"""MiniMax-M2: queries and keys are normalized over all heads together; a bias is used only to choose the experts."""

from tandem.engine.config.model import MixtureOfExperts, ModelSpec
from tandem.engine.models.families.experts.mixtral import mixtral_slots
from tandem.engine.models.families.family import (
    Family,
    Json,
    grouped_layers,
    make_model,
    parse_expert_count,
    parse_shape,
    parse_sigmoid_router,
)
from tandem.engine.models.parameters import Parameters
from tandem.engine.models.slots import ParameterSlot, renamed

_HEAD_DIM = 128
"""The head dimension if config.json does not have it, as in transformers."""


def _parse(given: Json) -> ModelSpec:
    config = {"rope_theta": 5000000.0, "head_dim": _HEAD_DIM} | dict(given)
    if config.get("rotary_dim"):
        config = {"partial_rotary_factor": int(config["rotary_dim"]) / int(config["head_dim"])} | config
    shape = parse_shape(config)
    experts = MixtureOfExperts(
        experts=parse_expert_count(config),
        top_k=int(config["num_experts_per_tok"]),
        width=int(config["intermediate_size"]),
        router=parse_sigmoid_router({}),
    )
    windows = (None,) * int(config["num_hidden_layers"])
    layers = grouped_layers(config, shape, windows, experts, qk_norm=shape.heads * shape.head_dim)
    return make_model(config, "MiniMaxM2ForCausalLM", layers)


def _slots(spec: ModelSpec, parameters: Parameters) -> dict[str, ParameterSlot]:
    return renamed(
        mixtral_slots(spec, parameters),
        {".gate.e_score_correction_bias": ".e_score_correction_bias"},
    )


FAMILY = Family(("MiniMaxM2ForCausalLM",), ("minimax_m2",), _parse, _slots)
