"""GLM-4.5 and GLM-4.6: a mixture of experts whose router is DeepSeek-V3's."""

from dataclasses import replace

from engine.config.model import ExpertRouter, MixtureOfExperts, ModelSpec
from engine.models.families.family import (
    Family,
    Json,
    grouped_layers,
    make_model,
    parse_dense,
    parse_expert_count,
    parse_shape,
)


def _parse(config: Json) -> ModelSpec:
    shape = parse_shape({"partial_rotary_factor": 0.5} | dict(config))
    router = ExpertRouter(
        score="sigmoid",
        renormalize=bool(config.get("norm_topk_prob", True)),
        scaling=float(config.get("routed_scaling_factor") or 1.0),
        groups=int(config.get("n_group") or 1),
        top_groups=int(config.get("topk_group") or 1),
        group_score="top_2_sum",
        choice_bias=True,
    )
    width = int(config["moe_intermediate_size"])
    experts = MixtureOfExperts(
        experts=parse_expert_count(config),
        top_k=int(config["num_experts_per_tok"]),
        width=width,
        router=router,
        shared_width=width * int(config.get("n_shared_experts") or 0),
    )
    layers = grouped_layers(
        config,
        shape,
        (None,) * int(config["num_hidden_layers"]),
        experts,
        qkv_bias=bool(config.get("attention_bias")),
        qk_norm=shape.head_dim if config.get("use_qk_norm") else 0,
    )
    for number in range(min(int(config.get("first_k_dense_replace") or 0), len(layers))):
        layers[number] = replace(layers[number], feed_forward=parse_dense(config))
    return make_model(config, "Glm4MoeForCausalLM", layers)


FAMILY = Family(("Glm4MoeForCausalLM",), ("glm4_moe",), _parse)
