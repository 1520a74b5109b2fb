"""K-EXAONE: layers with a window are rotated, those without have no position embedding; DeepSeek-V3's router."""

from tandem.engine.config.model import FeedForward, LayerSpec, MixtureOfExperts, ModelSpec
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
    without_rope,
)
from tandem.engine.models.parameters import Parameters, ParameterSlot, renamed, standard_slots

_DEFAULTS = {"sliding_window": 4096, "sliding_window_pattern": 4, "rms_norm_eps": 1e-5}
_MOE_DEFAULTS = {"routed_scaling_factor": 2.5, "num_shared_experts": 1, "num_experts": 64, "num_experts_per_tok": 8}
"""The defaults of transformers for fields that config.json may leave out."""


def exaone_layers(given: Json, feed_forward: FeedForward) -> list[LayerSpec]:
    """Return the layers of EXAONE 4 and K-EXAONE: heads of queries and keys are normalized.

    If some layers have a window, those without one have no position embedding.
    """
    config = _DEFAULTS | dict(given)
    window, pattern = parse_window(config), config["sliding_window_pattern"]
    # A pattern is a number of layers, of which the last has no window, or as many letters, for example LLLG.
    every = len(pattern) if isinstance(pattern, str) else int(pattern or 0)
    windows = windows_by_type(
        config,
        window,
        lambda number: "sliding_attention" if window and every and (number + 1) % every else "full_attention",
    )
    shape = parse_shape(config)
    layers = grouped_layers(config, shape, windows, feed_forward, qk_norm=shape.head_dim)
    if window is None:
        return layers
    return [without_rope(layer) if limit is None else layer for layer, limit in zip(layers, windows, strict=True)]


def _parse(given: Json) -> ModelSpec:
    config = _DEFAULTS | _MOE_DEFAULTS | dict(given)
    width = int(config["moe_intermediate_size"])
    experts = MixtureOfExperts(
        experts=parse_expert_count(config),
        top_k=int(config["num_experts_per_tok"]),
        width=width,
        router=parse_sigmoid_router(config),
        shared_width=width * int(config["num_shared_experts"]),
    )
    layers = with_dense(config, exaone_layers(config, experts), parse_dense_layers(config, 1))
    return make_model(config, "ExaoneMoeForCausalLM", layers)


def _slots(spec: ModelSpec, parameters: Parameters) -> dict[str, ParameterSlot]:
    return renamed(
        standard_slots(spec, parameters), {".mlp.gate.e_score_correction_bias": ".mlp.e_score_correction_bias"}
    )


FAMILY = Family(("ExaoneMoeForCausalLM",), ("exaone_moe",), _parse, _slots)
