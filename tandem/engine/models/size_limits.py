"""Limits for the sizes in config.json.

All published models are within these limits. For a larger model, the checks alone would take minutes.
"""

from collections.abc import Mapping
from typing import Any

from tandem.protocol.errors import ModelError

MAX_CONTEXT = 1 << 30
"""Maximum context length in tokens, a hundred times the longest published one.

Messages between processes store it in 32 bits.
"""
_LAYERS, _EXPERTS = 1 << 10, 1 << 12
"""Maximum numbers of layers, and of experts in a layer: eight times the largest published numbers."""
_EXPERTS_OF_ALL_LAYERS = 1 << 15
"""Maximum number of experts in all layers together; the largest published number is 23,040.

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
    "vocab_size": _VOCABULARY,
    "max_position_embeddings": MAX_CONTEXT,
    "sliding_window": MAX_CONTEXT,
}


def check_limits(config: Mapping[str, Any]) -> None:
    """Raise ModelError for the first size in a text model's config.json that exceeds its limit."""
    sizes = {name: _number(config.get(name)) for name in _LIMITS}
    for name, size in sizes.items():
        check_limit(name, size, _LIMITS[name])
    experts = max(size for name, size in sizes.items() if _LIMITS[name] is _EXPERTS)
    check_limit("experts in all layers", sizes["num_hidden_layers"] * experts, _EXPERTS_OF_ALL_LAYERS)


def check_limit(name: str, size: float, most: int) -> None:
    """Raise ModelError if `size` is above `most`."""
    if size > most:
        raise ModelError(f"{name} {size:.10g} is not supported; it must be at most {most}.")


def _number(value: object) -> float:
    """Return a size as a number: infinite if it exceeds every float, 0 if it is not a number."""
    try:
        return float(value)  # type: ignore[arg-type]
    except OverflowError:
        return float("inf")
    except (TypeError, ValueError):
        return 0.0
