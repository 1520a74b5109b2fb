"""Qwen1.5-MoE and Qwen2-57B-A14B: a mixture of experts whose shared expert has its own gate."""

from tandem.engine.config.model import ExpertRouter, MixtureOfExperts, ModelSpec
from tandem.engine.models.families.dense.qwen2 import qwen_windows
from tandem.engine.models.families.experts.qwen3_moe import dense_layers
from tandem.engine.models.families.family import (
    Family,
    Json,
    grouped_layers,
    make_model,
    parse_expert_count,
    parse_shape,
    with_dense,
)
from tandem.engine.models.parameters import Parameters
from tandem.engine.models.slots import ParameterSlot, renamed, standard_slots


def _parse(config: Json) -> ModelSpec:
    experts = MixtureOfExperts(
        experts=parse_expert_count(config),
        top_k=int(config["num_experts_per_tok"]),
        width=int(config["moe_intermediate_size"]),
        router=ExpertRouter(renormalize=bool(config.get("norm_topk_prob"))),
        shared_width=int(config["shared_expert_intermediate_size"]),
        shared_gate=True,
    )
    biased = bool(config.get("qkv_bias", True))
    layers = grouped_layers(config, parse_shape(config), qwen_windows(config), experts, qkv_bias=biased)
    return make_model(config, "Qwen2MoeForCausalLM", with_dense(config, layers, dense_layers(config)))


def _slots(spec: ModelSpec, parameters: Parameters) -> dict[str, ParameterSlot]:
    return renamed(standard_slots(spec, parameters), {".mlp.shared_experts.": ".mlp.shared_expert."})


FAMILY = Family(("Qwen2MoeForCausalLM",), ("qwen2_moe",), _parse, _slots)
