"""The types of the numbers in config.json, and limits for the sizes.

All published models are within these limits. For a larger model, the checks alone would take minutes.
"""

import math
import numbers
from collections.abc import Mapping
from typing import Any

from tandem.protocol.errors import ModelError

MAX_CONTEXT = 1 << 30
"""Maximum context length in tokens, a hundred times the longest published one.

Messages between processes store it in 32 bits.
"""
_LAYERS, _EXPERTS = 1 << 10, 1 << 12
"""Maximum numbers of layers, and of experts in a layer: eight times the largest published numbers."""
_EXPERTS_OF_ALL_LAYERS = 1 << 16
"""Maximum product of the numbers of layers and of experts; the largest published one is 55,296 (Nemotron 3 Ultra).

Each expert has three tensors, and reading a hundred thousand names takes a second.
"""
_WIDTH, _HEADS, _HEAD_WIDTH, _VOCABULARY = 1 << 20, 1 << 12, 1 << 12, 1 << 24
"""Limits of about thirty times the largest published numbers.

Products of these sizes, in bytes, fit into 64 bits.
"""
_LIMITS = {
    "num_hidden_layers": _LAYERS,
    "num_nextn_predict_layers": _LAYERS,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), _EXPERTS),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), _EXPERTS),
    **dict.fromkeys(("hidden_size", "intermediate_size", "q_lora_rank", "kv_lora_rank"), _WIDTH),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), _WIDTH),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), _HEADS),
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), _HEAD_WIDTH),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "mamba_num_heads", "n_groups"), _HEADS),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_head_dim", "ssm_state_size"), _HEAD_WIDTH),
    **dict.fromkeys(("linear_conv_kernel_dim", "conv_kernel", "conv_L_cache"), _HEAD_WIDTH),
    **dict.fromkeys(("moe_k", "moe_topk", "num_experts_per_tok", "top_k_experts", "n_group", "topk_group"), _EXPERTS),
    **dict.fromkeys(("first_k_dense_replace", "moe_layer_start_index", "no_rope_layer_interval"), _LAYERS),
    **dict.fromkeys(("max_window_layers", "interleave_moe_layer_step", "num_kv_shared_layers"), _LAYERS),
    **dict.fromkeys(("block_multiple_of", "prefix_dense_intermediate_size", "intermediate_size_mlp"), _WIDTH),
    **dict.fromkeys(("rotary_dim", "global_head_dim"), _HEAD_WIDTH),
    "num_global_key_value_heads": _HEADS,
    "hidden_size_per_layer_input": _WIDTH,
    "vocab_size_per_layer_input": _VOCABULARY,
    "index_n_heads": _HEADS,
    "index_head_dim": _HEAD_WIDTH,
    "index_topk": MAX_CONTEXT,
    **dict.fromkeys(("mamba_n_heads", "mamba_n_groups"), _HEADS),
    **dict.fromkeys(("mamba_d_state", "mamba_d_conv", "mamba_expand"), _HEAD_WIDTH),
    **dict.fromkeys(("shared_intermediate_size", "moe_shared_expert_intermediate_size", "moe_latent_size"), _WIDTH),
    **dict.fromkeys(("num_expert_group", "num_experts_per_token"), _EXPERTS),
    "num_dense_layers": _LAYERS,
    "vocab_size": _VOCABULARY,
    **dict.fromkeys(("max_position_embeddings", "original_max_position_embeddings", "sliding_window"), MAX_CONTEXT),
    "model_max_length": MAX_CONTEXT,
    **dict.fromkeys(("sliding_window_size", "attention_chunk_size", "floor_scale"), MAX_CONTEXT),
}
_PER_LAYER = ("moe_topk", "moe_intermediate_size")
"""The sizes that may be lists, with a size for each layer."""
_NUMBERS = (
    *("rms_norm_eps", "layer_norm_eps", "norm_eps", "rope_theta", "rope_local_base_freq", "partial_rotary_factor"),
    *("attention_multiplier", "residual_multiplier", "embedding_multiplier", "logits_scaling", "logit_scale"),
    *("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "routed_scaling_factor"),
    *("attn_scale", "attention_value_scale", "swa_rope_theta", "layernorm_epsilon"),
)
"""The numbers that may have a fraction."""


def check_limits(config: Mapping[str, Any]) -> None:
    """Raise ModelError for the first number in a text model's config.json that is none, or exceeds its limit."""
    sizes = {name: _size(name, config.get(name)) for name in _LIMITS}
    for name in _NUMBERS:
        if not math.isfinite(number := _number(name, config.get(name))):
            raise ModelError(f"{name} {number} is not supported; it must be finite.")
    for name, size in sizes.items():
        check_limit(name, size, _LIMITS[name])
    experts = max(size for name, size in sizes.items() if _LIMITS[name] is _EXPERTS)
    check_limit("experts in all layers", sizes["num_hidden_layers"] * experts, _EXPERTS_OF_ALL_LAYERS)


def check_limit(name: str, size: float, most: int) -> None:
    """Raise ModelError if `size` is above `most`."""
    if size > most:
        raise ModelError(f"{name} {size:.10g} is not supported; it must be at most {most}.")


def _size(name: str, value: object) -> float:
    """Return a size, or the largest of a list with a size for each layer. Raises ModelError if it has a fraction."""
    if isinstance(value, list) and value and name in _PER_LAYER:
        return max(_size(name, size) for size in value)
    size = _number(name, value)
    if not math.isinf(size) and size != round(size):
        raise ModelError(f"{name} {size} is not supported; it must be a whole number.")
    return size


def _number(name: str, value: object) -> float:
    """Return a number: infinite if it exceeds every float, 0 if it is missing. Raises ModelError for another type."""
    if value is None:
        return 0.0
    try:
        number = float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        return math.inf
    if math.isnan(number):
        raise ModelError(f"{name} {value!r:.40} is not supported; it must be a number.")
    return number
