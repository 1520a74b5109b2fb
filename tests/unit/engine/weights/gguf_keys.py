"""The metadata of GGUF files as llama.cpp's converter writes it."""

from collections.abc import Callable
from typing import Any

PER_LAYER_WINDOWS = {"exaone4", "exaone-moe", "gemma3", "olmo2"}
LAYER_NORMS = {"cohere2", "cohere2moe", "nemotron"}


def metadata(config: dict[str, Any], kind: str, *, split_latent: bool) -> dict[str, Any]:
    """Return the metadata that the converter writes for a config.json, by key without the architecture."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    theta = config.get("rope_theta") or scaling.get("rope_theta") or 10000.0
    if scaling.get("type") == "dynamic":
        theta, scaling = theta * scaling["alpha"] ** (head_dim / (head_dim - 2)), {}
    rotated = config.get("rotary_dim") or int(head_dim * config.get("partial_rotary_factor", 1))
    norm = "attention.layer_norm_epsilon" if kind in LAYER_NORMS else "attention.layer_norm_rms_epsilon"
    keys = {
        "context_length": config.get("max_position_embeddings") or config["model_max_length"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "block_count": config["num_hidden_layers"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "rope.freq_base": float(theta),
        "rope.dimension_count": rotated,
        norm: float(config.get("layer_norm_eps") or config.get("norm_eps") or config.get("rms_norm_eps") or 1e-5),
    }
    if "head_dim" in config:
        keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    keys |= _copied_fields(config)
    if "sliding_window" in config and kind in PER_LAYER_WINDOWS:
        every = config.get("sliding_window_pattern", 4)
        keys["attention.sliding_window_pattern"] = [
            bool((number + 1) % every) for number in range(config["num_hidden_layers"])
        ]
    if (rope := scaling.get("rope_type") or scaling.get("type")) in {"linear", "yarn"}:
        keys |= {"rope.scaling.type": rope, "rope.scaling.factor": float(scaling["factor"])}
    if original := scaling.get("original_max_position_embeddings") or config.get("original_max_position_embeddings"):
        keys["rope.scaling.original_context_length"] = original
    if "llama_4_scaling_beta" in scaling and kind == "mistral3":
        keys |= {"attention.temperature_scale": scaling["llama_4_scaling_beta"]}
        keys |= {"rope.scaling.yarn_log_multiplier": scaling["mscale_all_dim"]}
    if kind in _SPECIAL:
        keys |= _SPECIAL[kind](config)
    if "kv_lora_rank" in config:
        keys |= _latent_keys(config, scaling, split_latent=split_latent)
    return keys


def _copied_fields(config: dict[str, Any]) -> dict[str, Any]:
    names = {
        "interleave_moe_layer_step": ("interleave_moe_layer_step",),
        "attention.sliding_window": ("sliding_window",),
        "rope.freq_base_swa": ("rope_local_base_freq",),
        "attn_logit_softcapping": ("attn_logit_softcapping",),
        "final_logit_softcapping": ("final_logit_softcapping",),
        "attention.scale": ("attention_multiplier",),
        "embedding_scale": ("embedding_multiplier",),
        "residual_scale": ("residual_multiplier",),
        "logit_scale": ("logits_scaling", "logit_scale"),
        "expert_count": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
        "expert_used_count": ("num_experts_per_tok", "top_k_experts", "num_experts_per_token", "moe_k", "moe_topk"),
        "expert_feed_forward_length": ("moe_intermediate_size",),
        "expert_shared_feed_forward_length": (
            "shared_expert_intermediate_size",
            "shared_intermediate_size",
            "moe_shared_expert_intermediate_size",
        ),
        "moe_latent_size": ("moe_latent_size",),
        "expert_shared_count": ("n_shared_experts", "moe_num_shared_experts", "num_shared_experts"),
        "expert_weights_scale": ("routed_scaling_factor",),
        "expert_weights_norm": ("norm_topk_prob",),
        "expert_group_count": ("n_group",),
        "expert_group_used_count": ("topk_group",),
        "leading_dense_block_count": ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers"),
    }
    copied = {key: next((config[field] for field in fields if field in config), None) for key, fields in names.items()}
    if config["model_type"] == "exaone_moe":
        copied["leading_dense_block_count"] = 1
    if config["model_type"] in {"qwen2_moe", "qwen3_moe", "olmoe"}:
        # The architecture implies it.
        copied["expert_weights_norm"] = None
    return {key: value for key, value in copied.items() if value is not None}


def _llama4_keys(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "feed_forward_length": config["intermediate_size_mlp"],
        "expert_feed_forward_length": config["intermediate_size"],
    }


def _cohere2moe_keys(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "feed_forward_length": config["prefix_dense_intermediate_size"],
        "expert_feed_forward_length": config["intermediate_size"],
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "logit_scale": 0.0625,
        "attention.sliding_window_pattern": [False, True, False, True],
    }


def _mimo2_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of a file that says that it has a layer of multi-token prediction."""
    windowed = [layer == "sliding_attention" for layer in config["layer_types"]] + [True]
    kv_heads = config["num_key_value_heads"]
    return {
        "block_count": len(windowed),
        "nextn_predict_layers": 1,
        "attention.head_count_kv": [kv_heads * (1 + is_windowed) for is_windowed in windowed],
        "attention.sliding_window_pattern": [int(is_windowed) for is_windowed in windowed],
        "attention.value_length": config["v_head_dim"],
        "attention.value_scale": config["attention_value_scale"],
        "rope.dimension_count": int(0.334 * config["head_dim"]),
        "rope.freq_base_swa": 10000.0,
    }


def _delta_keys(config: dict[str, Any]) -> dict[str, Any]:
    heads, groups = config["linear_num_value_heads"], config["linear_num_key_heads"]
    inner, state = heads * config["linear_value_head_dim"], config["linear_key_head_dim"]
    return _ssm_keys(heads, inner, state, groups) | {
        "full_attention_interval": 4,
        "rope.dimension_count": config["head_dim"] // 4,
    }


def _lfm2_keys(config: dict[str, Any]) -> dict[str, Any]:
    attention = [layer == "full_attention" for layer in config["layer_types"]]
    width = config["intermediate_size"]
    return {
        "attention.head_count_kv": [config["num_key_value_heads"] * is_attention for is_attention in attention],
        "shortconv.l_cache": 3,
        "feed_forward_length": -(-(2 * width // 3) // 32) * 32 if config["model_type"] == "lfm2" else width,
    }


def _granitehybrid_keys(config: dict[str, Any]) -> dict[str, Any]:
    is_bamba = config["model_type"] == "bamba"
    if is_bamba:
        attention = [number in config["attn_layer_indices"] for number in range(config["num_hidden_layers"])]
    else:
        attention = [layer == "full_attention" for layer in config["layer_types"]]
    inner = config["mamba_expand"] * config["hidden_size"]
    return _ssm_keys(config["mamba_n_heads"], inner, config["mamba_d_state"], config.get("mamba_n_groups", 1)) | {
        "attention.head_count_kv": [config["num_key_value_heads"] * is_attention for is_attention in attention],
        "rope.scaling.finetuned": is_bamba,
        "context_length": config["max_position_embeddings"] if is_bamba else 2**20,
    }


def _nemotron_h_keys(config: dict[str, Any]) -> dict[str, Any]:
    letters = config.get("hybrid_override_pattern") or "M-M*-"
    width = config["moe_intermediate_size" if "E" in letters else "intermediate_size"]
    heads = config["mamba_num_heads"]
    inner = heads * config["mamba_head_dim"]
    return _ssm_keys(heads, inner, config["ssm_state_size"], config["n_groups"]) | {
        "attention.head_count_kv": [config["num_key_value_heads"] * (letter == "*") for letter in letters],
        "feed_forward_length": [width * (letter in "-E") for letter in letters],
        # The converter derives it from the hidden size where config.json has no head_dim.
        "rope.dimension_count": config["hidden_size"] // config["num_attention_heads"],
    }


def _gemma4_keys(config: dict[str, Any]) -> dict[str, Any]:
    windowed = [layer == "sliding_attention" for layer in config["layer_types"]]
    kv_heads, full_heads = config["num_key_value_heads"], config.get("num_global_key_value_heads")
    width, shared = config["intermediate_size"], config.get("num_kv_shared_layers", 0)
    own = len(windowed) - shared
    keys = {
        "attention.sliding_window_pattern": windowed,
        "attention.key_length": config["global_head_dim"],
        "attention.value_length": config["global_head_dim"],
        "attention.key_length_swa": config["head_dim"],
        "attention.value_length_swa": config["head_dim"],
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "rope.dimension_count": config["global_head_dim"],
        "rope.dimension_count_swa": config["head_dim"],
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4,
    }
    if full_heads is not None:
        keys["attention.head_count_kv"] = [kv_heads if is_windowed else full_heads for is_windowed in windowed]
    if config.get("use_double_wide_mlp"):
        keys["feed_forward_length"] = [width if number < own else 2 * width for number in range(len(windowed))]
    return keys


def _ssm_keys(heads: int, inner: int, state: int, groups: int) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": 4,
        "ssm.state_size": state,
        "ssm.group_count": groups,
        "ssm.inner_size": inner,
        "ssm.time_step_rank": heads,
    }


def _latent_keys(config: dict[str, Any], scaling: dict[str, Any], *, split_latent: bool) -> dict[str, Any]:
    rotated, rank = config["qk_rope_head_dim"], config["kv_lora_rank"]
    length, values = config["qk_nope_head_dim"] + rotated, config["v_head_dim"]
    keys = {
        "attention.kv_lora_rank": rank,
        "rope.dimension_count": rotated,
        "expert_gating_func": 1 if config["model_type"] == "deepseek_v2" else 2,
    }
    if split_latent:
        keys |= {"attention.head_count_kv": 1, "attention.key_length": rank + rotated, "attention.value_length": rank}
        keys |= {"attention.key_length_mla": length, "attention.value_length_mla": values}
    else:
        keys |= {"attention.key_length": length, "attention.value_length": values}
    if "q_lora_rank" in config:
        keys["attention.q_lora_rank"] = config["q_lora_rank"]
    if "index_topk" in config:
        keys |= {
            "attention.indexer.head_count": config["index_n_heads"],
            "attention.indexer.key_length": config["index_head_dim"],
            "attention.indexer.top_k": config["index_topk"],
        }
    if "indexer_types" in config:
        keys["attention.indexer.types"] = [kind == "full" for kind in config["indexer_types"]]
    if linear := config.get("linear_attn_config"):
        latent = [number in linear["full_attn_layers"] for number in range(1, config["num_hidden_layers"] + 1)]
        keys["attention.head_count_kv"] = [int(is_latent) for is_latent in latent]
        keys |= {"kda.head_dim": linear["head_dim"], "ssm.conv_kernel": linear["short_conv_kernel_size"]}
    if "mscale_all_dim" in scaling:
        keys["rope.scaling.yarn_log_multiplier"] = 0.1 * scaling["mscale_all_dim"]
    return keys


_SPECIAL: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "llama4": _llama4_keys,
    "cohere2moe": _cohere2moe_keys,
    "gemma4": _gemma4_keys,
    "mimo2": _mimo2_keys,
    "qwen3next": _delta_keys,
    "qwen35": _delta_keys,
    "qwen35moe": _delta_keys,
    "lfm2": _lfm2_keys,
    "lfm2moe": _lfm2_keys,
    "granitehybrid": _granitehybrid_keys,
    "nemotron_h": _nemotron_h_keys,
    "nemotron_h_moe": _nemotron_h_keys,
}
"""The metadata that only some architectures have, or have in another form."""
