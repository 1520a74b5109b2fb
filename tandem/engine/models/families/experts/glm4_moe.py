"""GLM-4.5 and GLM-4.6: a mixture of experts with the router of DeepSeek-V3."""

from tandem.engine.config.model import MixtureOfExperts, ModelSpec
from tandem.engine.models.families.family import (
    Family,
    Json,
    grouped_layers,
    make_model,
    parse_expert_count,
    parse_shape,
    parse_sigmoid_router,
    with_dense,
)
from tandem.engine.models.mtp_layout import NUMBERED_MTP


def _parse(config: Json) -> ModelSpec:
    shape = parse_shape({"partial_rotary_factor": 0.5} | dict(config))
    width = int(config["moe_intermediate_size"])
    experts = MixtureOfExperts(
        experts=parse_expert_count(config),
        top_k=int(config["num_experts_per_tok"]),
        width=width,
        router=parse_sigmoid_router(config),
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
    dense = range(int(config.get("first_k_dense_replace") or 0))
    return make_model(config, "Glm4MoeForCausalLM", with_dense(config, layers, dense))


FAMILY = Family(("Glm4MoeForCausalLM",), ("glm4_moe",), _parse, mtp=NUMBERED_MTP)
