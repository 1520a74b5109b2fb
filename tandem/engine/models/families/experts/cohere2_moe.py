"""Cohere 2 with experts: attention and experts of a layer take the same input, with the same norm."""

from dataclasses import replace

from torch import Tensor

from tandem.engine.config.model import ExpertRouter, MixtureOfExperts, ModelSpec
from tandem.engine.models.families.family import (
    Family,
    Json,
    grouped_layers,
    make_model,
    parse_dense_layers,
    parse_expert_count,
    parse_shape,
    parse_window,
    windows_by_type,
    with_dense,
    without_rope,
)
from tandem.engine.models.families.rows import paired_rope_slots
from tandem.engine.models.parameters import Parameters
from tandem.engine.models.slots import ParameterSlot
from tandem.protocol.errors import ModelError

_DEFAULTS = {"sliding_window": 4096, "sliding_window_pattern": 4, "prefix_dense_sliding_window_pattern": 1}
"""The defaults of transformers for fields that config.json may leave out."""


def _parse(given: Json) -> ModelSpec:
    config = _DEFAULTS | dict(given)
    dense = parse_dense_layers(config)
    windows = _windows(config, int(config.get("first_k_dense_replace") or 0))
    biased = bool(config.get("attention_bias"))
    layers = grouped_layers(
        config, parse_shape(config, head_dim=128), windows, _experts(config), qkv_bias=biased, output_bias=biased
    )
    width = config["prefix_dense_intermediate_size"] if dense else None
    layers = with_dense(config | {"intermediate_size": width}, layers, dense)
    # Layers without a window have no position embedding, but for dense ones if all of these have no window.
    rotated = dense if int(config["prefix_dense_sliding_window_pattern"]) == 1 else []
    layers = [
        layer if window is not None or number in rotated else without_rope(layer)
        for number, (layer, window) in enumerate(zip(layers, windows, strict=True))
    ]
    layer_norms = config.get("rms_norm_eps") is None
    return make_model(
        config,
        "Cohere2MoeForCausalLM",
        [replace(layer, parallel=True) for layer in layers],
        norm_eps=float(config.get("layer_norm_eps", 1e-5) if layer_norms else config["rms_norm_eps"]),
        tied_by_default=True,
        layer_norms=layer_norms,
        logits_scale=float(config.get("logit_scale", 0.0625)),
    )


def _windows(config: Json, prefix_layers: int) -> tuple[int | None, ...]:
    """Return each layer's window; the first `prefix_layers` layers have a pattern of their own."""
    prefix_every, every = int(config["prefix_dense_sliding_window_pattern"]), int(config["sliding_window_pattern"])

    def kind(number: int) -> str:
        remainder = (number + 1) % prefix_every if number < prefix_layers else (number - prefix_layers + 1) % every
        return "sliding_attention" if remainder else "full_attention"

    return windows_by_type(config, parse_window(config), kind)


def _experts(config: Json) -> MixtureOfExperts:
    shared = int(config.get("num_shared_experts") or 0)
    combination = config.get("shared_expert_combination_strategy", "average")
    if combination not in {"average", "sum"}:
        raise ModelError(f"shared_expert_combination_strategy {combination!r} is not supported; average and sum are.")
    score = config.get("expert_selection_fn", "softmax")
    if score not in {"softmax", "sigmoid"}:
        raise ModelError(f"expert_selection_fn {score!r} is not supported; softmax and sigmoid are.")
    halved = shared > 0 and combination == "average"
    quantization = config.get("quantization_config") or config.get("compression_config")
    # Converted GGUF files have no codes of the product that is halved.
    if halved and quantization and quantization.get("quant_method") != "gguf":
        raise ModelError(
            "the average of shared and other experts is not supported with quantized weights; use weights of 16 bits."
        )
    return MixtureOfExperts(
        experts=parse_expert_count(config),
        top_k=int(config["num_experts_per_tok"]),
        width=int(config["intermediate_size"]),
        router=ExpertRouter(
            score="sigmoid" if score == "sigmoid" else "softmax_of_top_k",
            renormalize=bool(config.get("norm_topk_prob", True)),
            scaling=0.5 if halved else 1.0,
        ),
        shared_width=shared * int(config["intermediate_size"]),
    )


def _slots(spec: ModelSpec, parameters: Parameters) -> dict[str, ParameterSlot]:
    """Return the slots; where the experts are averaged with the shared one, its last product is halved at load."""
    slots = paired_rope_slots(spec, parameters)
    for number, layer in enumerate(spec.layers):
        experts = layer.feed_forward
        if isinstance(experts, MixtureOfExperts) and experts.shared_width and experts.router.scaling == 0.5:
            name = f"model.layers.{number}.mlp.shared_experts.down_proj.weight"
            slots[name] = replace(slots[name], transform=_halved)
    return slots


def _halved(stored: Tensor) -> Tensor:
    return stored / 2


FAMILY = Family(("Cohere2MoeForCausalLM",), ("cohere2_moe",), _parse, _slots)
