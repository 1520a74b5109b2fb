"""dots.llm1: the attention of Qwen3, and experts with the router of DeepSeek-V3."""

from tandem.engine.config.model import MixtureOfExperts, ModelSpec
from tandem.engine.models.families.family import (
    Family,
    Json,
    grouped_layers,
    make_model,
    parse_dense_layers,
    parse_expert_count,
    parse_shape,
    parse_sigmoid_router,
    parse_window,
    windows_by_type,
    with_dense,
)

_DEFAULTS = {"sliding_window": 4096, "max_window_layers": 62, "norm_topk_prob": False}
"""The defaults of transformers for fields that config.json may leave out."""


def _parse(given: Json) -> ModelSpec:
    config = _DEFAULTS | dict(given)
    shape, biased, width = parse_shape(config), bool(config.get("attention_bias")), int(config["moe_intermediate_size"])
    window, first = parse_window(config), int(config["max_window_layers"])
    windows = windows_by_type(
        config, window, lambda number: "full_attention" if number < first or window is None else "sliding_attention"
    )
    experts = MixtureOfExperts(
        experts=parse_expert_count(config),
        top_k=int(config["num_experts_per_tok"]),
        width=width,
        router=parse_sigmoid_router(config),
        shared_width=width * int(config.get("n_shared_experts") or 0),
    )
    layers = grouped_layers(
        config, shape, windows, experts, qkv_bias=biased, output_bias=biased, qk_norm=shape.head_dim
    )
    return make_model(config, "Dots1ForCausalLM", with_dense(config, layers, parse_dense_layers(config)))


FAMILY = Family(("Dots1ForCausalLM",), ("dots1",), _parse)
