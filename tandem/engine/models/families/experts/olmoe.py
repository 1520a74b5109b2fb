"""OLMoE: queries and keys are normalized over all heads together."""

from tandem.engine.config.model import ExpertRouter, MixtureOfExperts, ModelSpec
from tandem.engine.models.families.family import (
    Family,
    Json,
    grouped_layers,
    make_model,
    parse_expert_count,
    parse_shape,
)
from tandem.protocol.errors import ModelError


def _parse(config: Json) -> ModelSpec:
    if config.get("clip_qkv") is not None:
        raise ModelError("clip_qkv is not supported.")
    shape = parse_shape(config)
    experts = MixtureOfExperts(
        experts=parse_expert_count(config),
        top_k=int(config["num_experts_per_tok"]),
        width=int(config["intermediate_size"]),
        router=ExpertRouter(renormalize=bool(config.get("norm_topk_prob"))),
    )
    biased = bool(config.get("attention_bias"))
    layers = grouped_layers(
        config,
        shape,
        (None,) * int(config["num_hidden_layers"]),
        experts,
        qkv_bias=biased,
        output_bias=biased,
        qk_norm=shape.heads * shape.head_dim,
    )
    return make_model(config, "OlmoeForCausalLM", layers)


FAMILY = Family(("OlmoeForCausalLM",), ("olmoe",), _parse)
