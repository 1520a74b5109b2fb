"""The fields of config.json that only one family has, or only some, from the header of a GGUF file."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from tandem.engine.weights.gguf_delta import DELTA_FIELDS, kimi_fields
from tandem.engine.weights.gguf_layout import Fields, Header
from tandem.engine.weights.gguf_states import STATE_FIELDS, granite_hybrid
from tandem.protocol.errors import ModelError

_LARGEST_GEMMA2, _LARGEST_GEMMA3 = 46, 62
"""The number of layers of the models of 27 billion parameters, which scale queries by their hidden size per head."""
_LLAMA4_MAVERICK_EXPERTS = 128
_GLM_5_2_CONTEXT = 1 << 20
"""The context of GLM-5.2, whose layers share choices; those of GLM-5 and 5.1, whose layers do not, are shorter."""
_SOFTMAX = 1
"""The value of `expert_gating_func` for softmax scores."""


def family_fields(header: Header, model_type: str) -> dict[str, Any]:
    """Return the fields of a file of this family; {} if its family has none but those of all families."""
    return _FIELDS[model_type](header) if model_type in _FIELDS else {}


def windows(header: Header) -> dict[str, Any]:
    """Return the window and, if the file has them, the attention types of the layers; else those of the family."""
    window, pattern = header.get("attention.sliding_window"), header.get("attention.sliding_window_pattern")
    if not window or pattern is None:
        return {"sliding_window": window or None}
    every = [bool(windowed) for windowed in pattern] if isinstance(pattern, list) else None
    numbers = range(header.layers)
    windowed = [(number + 1) % pattern != 0 for number in numbers] if every is None else every[: header.layers]
    kinds = ["sliding_attention" if is_windowed else "full_attention" for is_windowed in windowed]
    return {"sliding_window": window, "layer_types": kinds}


def _gemma(largest: int, header: Header) -> dict[str, Any]:
    heads, hidden = header.need("attention.head_count"), header.need("embedding_length")
    is_largest = header.need("block_count") == largest
    return {"query_pre_attn_scalar": hidden // heads if is_largest else header.get("attention.key_length", 256)} | (
        header.given(
            attn_logit_softcapping="attn_logit_softcapping",
            final_logit_softcapping="final_logit_softcapping",
            rope_local_base_freq="rope.freq_base_swa",
        )
    )


def _gemma4(header: Header) -> dict[str, Any]:
    """Return the fields of Gemma 4, whose layers with and without a window have heads of their own."""
    kinds: list[str] = windows(header).get("layer_types", [])
    full = kinds.index("full_attention") if "full_attention" in kinds else header.layers - 1
    windowed = kinds.index("sliding_attention") if "sliding_attention" in kinds else 0
    heads, widths = header.need("attention.head_count_kv"), header.need("feed_forward_length")
    by_type: dict[str, Any] = {}
    if isinstance(heads, list):
        by_type = {"num_key_value_heads": heads[windowed], "num_global_key_value_heads": heads[full]}
    return {
        "head_dim": header.need("attention.key_length_swa"),
        "global_head_dim": header.need("attention.key_length"),
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in header.tensors,
        "num_kv_shared_layers": header.get("attention.shared_kv_layers", 0),
        "intermediate_size": widths[0] if isinstance(widths, list) else widths,
        "use_double_wide_mlp": isinstance(widths, list) and widths[-1] > widths[0],
        "hidden_size_per_layer_input": header.get("embedding_length_per_layer_input", 0),
        "enable_moe_block": bool(header.get("expert_count")),
        "top_k_experts": header.get("expert_used_count"),
    } | (by_type | header.given(final_logit_softcapping="final_logit_softcapping"))


def _granite(header: Header) -> dict[str, Any]:
    head_dim = header.need("embedding_length") // header.need("attention.head_count")
    return {"attention_multiplier": head_dim**-0.5} | header.given(
        attention_multiplier="attention.scale",
        embedding_multiplier="embedding_scale",
        residual_multiplier="residual_scale",
        logits_scaling="logit_scale",
        shared_intermediate_size="expert_shared_feed_forward_length",
    )


def _llama4(header: Header) -> dict[str, Any]:
    return {
        "intermediate_size_mlp": header.need("feed_forward_length"),
        "intermediate_size": header.need("expert_feed_forward_length"),
        # The file does not say that the models with 128 experts have no norms of queries and keys.
        "use_qk_norm": header.need("expert_count") != _LLAMA4_MAVERICK_EXPERTS,
    } | header.given(interleave_moe_layer_step="interleave_moe_layer_step")


def _cohere2(header: Header) -> dict[str, Any]:
    return {"layer_norm_eps": header.norm_eps} | header.given(logit_scale="logit_scale")


def _cohere2_moe(header: Header) -> dict[str, Any]:
    """Return the fields of Cohere 2 with experts, whose dense layers are wider than the experts."""
    return {
        "layer_norm_eps": header.norm_eps,
        "rms_norm_eps": header.get("attention.layer_norm_rms_epsilon"),
        "intermediate_size": header.need("expert_feed_forward_length"),
        "prefix_dense_intermediate_size": header.need("feed_forward_length"),
        "expert_selection_fn": "softmax" if header.get("expert_gating_func") == _SOFTMAX else "sigmoid",
    } | header.given(logit_scale="logit_scale", num_shared_experts="expert_shared_count")


def _ernie4_5_moe(header: Header) -> dict[str, Any]:
    return {
        "moe_num_experts": header.need("expert_count"),
        "moe_k": header.need("expert_used_count"),
        "moe_num_shared_experts": header.get("expert_shared_count", 0),
        "moe_layer_start_index": header.get("leading_dense_block_count", 0),
        "moe_layer_interval": header.get("interleave_moe_layer_step", 1),
    }


def _mimo2(header: Header) -> dict[str, Any]:
    """Return the fields of MiMo-V2-Flash, whose layers with a window have more KV heads than the others."""
    return {
        "num_key_value_heads": min(header.kv_heads()),
        "v_head_dim": header.need("attention.value_length"),
        "moe_layer_freq": [
            int(f"blk.{number}.ffn_gate_inp.weight" in header.tensors) for number in range(header.layers)
        ],
    } | header.given(swa_rope_theta="rope.freq_base_swa", attention_value_scale="attention.value_scale")


def _latent_shape(header: Header) -> dict[str, Any]:
    """Return the fields of latent attention. Old files have the length of a head's keys where new ones the cached."""
    rotated = header.need("rope.dimension_count")
    keys = header.get("attention.key_length_mla") or header.need("attention.key_length")
    return {
        "kv_lora_rank": header.need("attention.kv_lora_rank"),
        "q_lora_rank": header.get("attention.q_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": keys - rotated,
        "v_head_dim": header.get("attention.value_length_mla") or header.need("attention.value_length"),
        "attention_bias": False,
    }


def _latent(header: Header) -> dict[str, Any]:
    if header.get("attention.temperature_scale"):
        raise ModelError("attention.temperature_scale is not supported with latent attention.")
    return _latent_shape(header)


def _deepseek_v2(header: Header) -> dict[str, Any]:
    grouped = header.get("expert_group_count", 1) > 1
    return _latent(header) | {"topk_method": "group_limited_greedy" if grouped else "greedy"}


def _sparse(header: Header) -> dict[str, Any]:
    """Return the fields of sparse attention. Files of GLM-5.2 may not say which layers share a choice."""
    kinds = header.get("attention.indexer.types")
    shared: dict[str, Any] = {}
    if kinds:
        shared = {"indexer_types": ["full" if full else "shared" for full in kinds[: header.layers]]}
    elif header.need("context_length") >= _GLM_5_2_CONTEXT:
        shared = {"index_topk_freq": 4, "index_skip_topk_offset": 3}
    return _latent(header) | {
        "index_n_heads": header.need("attention.indexer.head_count"),
        "index_head_dim": header.need("attention.indexer.key_length"),
        "index_topk": header.need("attention.indexer.top_k"),
        **shared,
    }


_FIELDS: Mapping[str, Fields] = {
    "gemma2": partial(_gemma, _LARGEST_GEMMA2),
    "gemma3_text": partial(_gemma, _LARGEST_GEMMA3),
    "gemma4_text": _gemma4,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _latent,
    "deepseek_v32": _sparse,
    "glm_moe_dsa": _sparse,
    "mistral4": _latent_shape,
    "granite": _granite,
    "granitemoe": _granite,
    "granitemoeshared": _granite,
    "llama4_text": _llama4,
    "qwen2_moe": lambda header: {
        "shared_expert_intermediate_size": header.need("expert_shared_feed_forward_length"),
    },
    "cohere2": _cohere2,
    "cohere2_moe": _cohere2_moe,
    "nemotron": lambda header: {"norm_eps": header.norm_eps},
    "phi3": lambda header: header.given(original_max_position_embeddings="rope.scaling.original_context_length"),
    "glm4_moe": lambda header: {"use_qk_norm": "blk.0.attn_q_norm.weight" in header.tensors},
    "ernie4_5": lambda header: {"use_bias": "blk.0.attn_q.bias" in header.tensors},
    "ernie4_5_moe": _ernie4_5_moe,
    "exaone_moe": lambda header: header.given(num_shared_experts="expert_shared_count"),
    "mimo_v2_flash": _mimo2,
    "kimi_linear": lambda header: _latent(header) | kimi_fields(header),
    **STATE_FIELDS,
    **DELTA_FIELDS,
    "granitemoehybrid": lambda header: _granite(header) | granite_hybrid(header),
}
"""The fields of each family by its `model_type`."""
