"""Qwen3-30B-A3B and Qwen3-235B-A22B: Qwen3's attention, and experts in all layers not configured as dense."""

from tandem.engine.config.model import ExpertRouter, MixtureOfExperts, ModelSpec
from tandem.engine.models.families.dense.qwen2 import qwen_windows
from tandem.engine.models.families.dense.qwen3 import HEAD_DIM
from tandem.engine.models.families.family import (
    Family,
    Json,
    grouped_layers,
    make_model,
    parse_expert_count,
    parse_shape,
    with_dense,
)


def dense_layers(config: Json) -> list[int]:
    """Return the numbers of the layers that have no experts."""
    named, step = config.get("mlp_only_layers") or (), int(config.get("decoder_sparse_step") or 1)
    return [number for number in range(int(config["num_hidden_layers"])) if number in named or (number + 1) % step]


def qwen3_moe_model(config: Json, architecture: str) -> ModelSpec:
    """Return a model with Qwen3's attention and experts."""
    shape, biased = parse_shape(config, head_dim=HEAD_DIM), bool(config.get("attention_bias"))
    experts = MixtureOfExperts(
        experts=parse_expert_count(config),
        top_k=int(config["num_experts_per_tok"]),
        width=int(config["moe_intermediate_size"]),
        router=ExpertRouter(renormalize=bool(config.get("norm_topk_prob"))),
    )
    layers = grouped_layers(
        config,
        shape,
        qwen_windows(config),
        experts,
        qkv_bias=biased,
        output_bias=biased,
        qk_norm=shape.head_dim,
    )
    return make_model(config, architecture, with_dense(config, layers, dense_layers(config)))


def _parse(config: Json) -> ModelSpec:
    return qwen3_moe_model(config, "Qwen3MoeForCausalLM")


FAMILY = Family(("Qwen3MoeForCausalLM",), ("qwen3_moe",), _parse)
