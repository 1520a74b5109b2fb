"""Limits of the sizes in config.json: beyond them no model is published, and to look at one would take minutes."""

from collections.abc import Mapping
from typing import Any

from tandem.protocol.errors import ModelError

MAX_CONTEXT = 1 << 30
"""Positions: a hundred times the longest published context. Messages between processes have them in 32 bits."""
_LAYERS, _EXPERTS = 1 << 10, 1 << 12
"""Eight times the most that is published, of either."""
_EXPERTS_OF_ALL_LAYERS = 1 << 15
"""The most that is published is 23,040. Each has three tensors, and a hundred thousand names take a second."""
_WIDTH, _HEADS, _HEAD_WIDTH, _VOCABULARY = 1 << 20, 1 << 12, 1 << 12, 1 << 24
"""Some thirty times the most that is published. The bytes of no product of them exceed 64 bits."""
_LIMITS = {
    "num_hidden_layers": _LAYERS,
    "num_nextn_predict_layers": _LAYERS,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts"), _EXPERTS),
    **dict.fromkeys(("hidden_size", "intermediate_size", "q_lora_rank", "kv_lora_rank"), _WIDTH),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), _WIDTH),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), _HEADS),
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), _HEAD_WIDTH),
    "vocab_size": _VOCABULARY,
    "max_position_embeddings": MAX_CONTEXT,
    "sliding_window": MAX_CONTEXT,
}


def check_limits(config: Mapping[str, Any]) -> None:
    """Raises ModelError for the first size of a text model's config.json that is above its limit."""
    sizes = {name: _number(config.get(name)) for name in _LIMITS}
    for name, size in sizes.items():
        check_limit(name, size, _LIMITS[name])
    experts = max(size for name, size in sizes.items() if _LIMITS[name] is _EXPERTS)
    check_limit("experts in all layers", sizes["num_hidden_layers"] * experts, _EXPERTS_OF_ALL_LAYERS)


def check_limit(name: str, size: float, most: int) -> None:
    """Raises ModelError if `size` is above `most`."""
    if size > most:
        raise ModelError(f"{name} {size:.10g} is not supported; it must be at most {most}.")


def _number(value: object) -> float:
    """Returns a size as the families read it, infinite if it is larger than any; 0 if it is none."""
    try:
        return float(value)  # type: ignore[arg-type]
    except OverflowError:
        return float("inf")
    except (TypeError, ValueError):
        return 0.0
