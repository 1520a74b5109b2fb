"""Tiny models on disk, one per model family, and batch rows for them."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tandem.engine.config import EngineConfig
from tandem.engine.model_runner import ModelRunner
from tandem.engine.models.allocation import allocate_parameters
from tandem.engine.models.families import slots_of
from tandem.engine.models.load_spec import parse_spec
from tandem.engine.steps.batch import StepBatch, StepRow
from tandem.engine.steps.sampling_metadata import SamplingInput
from tandem.engine.weights.safetensors_file import write_float32
from tandem.protocol.messages import SamplingParams

_BASE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
_NULLS = {"q_lora_rank"}
"""Fields for which null means something else than absence."""
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
_INDEXER: dict[str, Any] = {"q_lora_rank": 40, "index_n_heads": 16, "index_head_dim": 16, "index_topk": 12}
"""An indexer that chooses fewer tokens than the tests' prompts have.

With many heads no two scores are equal. With few, many scores would be 0, and the choice among them arbitrary.
"""
_DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "rope_scaling": _YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 1.0},
}
_GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "head_dim": 16,
    "num_hidden_layers": 4,
    "intermediate_size": 64,
    "sliding_window": 24,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
}

_DELTA = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}
"""Gated DeltaNet in three of four layers."""
_MAMBA = {"mamba_expand": 1, "mamba_n_heads": 8, "mamba_d_head": "auto", "mamba_d_state": 8}
_GRANITE_HYBRID = {
    "model_type": "granitemoehybrid",
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "shared_intermediate_size": 48,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.1,
    "logits_scaling": 6.0,
    "tie_word_embeddings": True,
}
_NEMOTRON_EXPERTS = {
    "model_type": "nemotron_h",
    "num_hidden_layers": None,
    "hybrid_override_pattern": "MEM*E",
    "head_dim": 32,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 96,
    "routed_scaling_factor": 2.5,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama2": _BASE | {"num_key_value_heads": 4},
    "llama3": _BASE | {"rope_scaling": _LLAMA3_ROPE, "rope_theta": 500000.0},
    "mqa": _BASE | {"num_key_value_heads": 1, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "biased": _BASE | {"attention_bias": True, "mlp_bias": True, "head_dim": 32},
    "smollm2": _BASE
    | {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 96, "tie_word_embeddings": True},
    "smollm3": _BASE
    | {"model_type": "smollm3", "num_hidden_layers": 4, "no_rope_layer_interval": 2, "pad_token_id": 0},
    "seed_oss": _BASE | {"model_type": "seed_oss", "head_dim": 32},
    "arcee": _BASE | {"model_type": "arcee", "hidden_act": "relu2", "mlp_bias": True},
    "mistral": _BASE | {"model_type": "mistral", "sliding_window": 12},
    "qwen2": _BASE | {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 8},
    "qwen2_windows": _BASE
    | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "qwen3": _BASE | {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
    "yarn": _BASE | {"model_type": "qwen3", "head_dim": 32, "rope_parameters": _YARN_ROPE, "rope_theta": None},
    "ministral": _BASE
    | {
        "model_type": "ministral",
        "sliding_window": 20,
        "head_dim": 32,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "ministral3": _BASE
    | {
        "model_type": "ministral3",
        "head_dim": 32,
        "rope_parameters": _YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4},
        "rope_theta": None,
    },
    "mixtral": _BASE | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": _BASE
    | {
        "model_type": "qwen2_moe",
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 80,
        "norm_topk_prob": False,
        "mlp_only_layers": [1],
    },
    "qwen3_moe": _BASE
    | {
        "model_type": "qwen3_moe",
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "gpt_oss": _BASE | _GPT_OSS | {"rope_scaling": _YARN_ROPE | {"truncate": False, "factor": 8.0}},
    "gpt_oss_unscaled": _BASE | _GPT_OSS | {"rope_scaling": {"rope_type": "default"}},
    "deepseek_v2_lite": _BASE | _LATENT | {"model_type": "deepseek_v2", "topk_method": "greedy"},
    "deepseek_v2": _BASE
    | _LATENT
    | {
        "model_type": "deepseek_v2",
        "q_lora_rank": 40,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
        "rope_scaling": _YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 0.7},
    },
    "deepseek_v3": _BASE | _LATENT | _DEEPSEEK_V3 | {"q_lora_rank": 40},
    "deepseek_v3_full_queries": _BASE | _LATENT | _DEEPSEEK_V3,
    "glm4_moe": _BASE
    | {
        "model_type": "glm4_moe",
        "head_dim": 32,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 1.5,
    },
    "gemma": _BASE
    | {"model_type": "gemma", "head_dim": 32, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
    "gemma2": _BASE
    | {
        "model_type": "gemma2",
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "sliding_window": 20,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
    "gemma3": _BASE
    | {
        "model_type": "gemma3_text",
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "num_hidden_layers": 4,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
        "rope_local_base_freq": 100.0,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
    "gemma4": _BASE
    | {
        "model_type": "gemma4_text",
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "sliding_window": 20,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 3.0,
        "rope_theta": None,
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "pad_token_id": 0,
    },
    "gemma4_e2b": _BASE
    | {
        "model_type": "gemma4_text",
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": 20,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 160,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "rope_theta": None,
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "pad_token_id": 0,
    },
    "gemma4_experts": _BASE
    | {
        "model_type": "gemma4_text",
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "sliding_window": 20,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 3,
        "moe_intermediate_size": 48,
        "rope_theta": None,
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "pad_token_id": 0,
    },
    "phi3": _BASE | {"model_type": "phi3", "sliding_window": 30, "pad_token_id": 0},
    "phi3_longrope": _BASE
    | {
        "model_type": "phi3",
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0 + pair / 8 for pair in range(8)],
            "long_factor": [1.0 + pair * pair for pair in range(8)],
        },
        "original_max_position_embeddings": 16,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
    },
    "glm4": _BASE
    | {
        "model_type": "glm4",
        "head_dim": 32,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "pad_token_id": 0,
    },
    "granite": _BASE
    | {
        "model_type": "granite",
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.1,
        "logits_scaling": 8.0,
        "tie_word_embeddings": True,
    },
    "granite_moe": _BASE
    | {
        "model_type": "granitemoe",
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "intermediate_size": 32,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.1,
        "logits_scaling": 6.0,
        "tie_word_embeddings": True,
    },
    "granite_moe_shared": _BASE
    | {
        "model_type": "granitemoeshared",
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "intermediate_size": 32,
        "shared_intermediate_size": 48,
        "residual_multiplier": 0.22,
        "logits_scaling": 6.0,
    },
    "cohere2": _BASE
    | {
        "model_type": "cohere2",
        "num_hidden_layers": 4,
        "sliding_window": 20,
        "sliding_window_pattern": 2,
        "layer_norm_eps": 1e-5,
        "rms_norm_eps": None,
        "logit_scale": 0.3,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
    },
    "nemotron": _BASE
    | {
        "model_type": "nemotron",
        "head_dim": 32,
        "hidden_act": "relu2",
        "norm_eps": 1e-5,
        "rms_norm_eps": None,
        "partial_rotary_factor": 0.5,
    },
    "olmo2": _BASE | {"model_type": "olmo2", "pad_token_id": 0},
    "olmo3": _BASE
    | {
        "model_type": "olmo3",
        "sliding_window": 20,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        "num_hidden_layers": 4,
        "pad_token_id": 0,
    },
    "olmoe": _BASE
    | {
        "model_type": "olmoe",
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "intermediate_size": 32,
        "norm_topk_prob": False,
        "pad_token_id": 0,
    },
    "ernie4_5": _BASE | {"model_type": "ernie4_5", "use_bias": True, "head_dim": 32, "tie_word_embeddings": True},
    "ernie4_5_moe": _BASE
    | {
        "model_type": "ernie4_5_moe",
        "moe_num_experts": 8,
        "moe_k": 3,
        "moe_num_shared_experts": 2,
        "moe_intermediate_size": 32,
        "moe_layer_start_index": 1,
        "tie_word_embeddings": True,
    },
    "dots1": _BASE
    | {
        "model_type": "dots1",
        "head_dim": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "sliding_window": 14,
        "max_window_layers": 2,
    },
    "minimax_m2": _BASE
    | {
        "model_type": "minimax_m2",
        "head_dim": 32,
        "rotary_dim": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "intermediate_size": 32,
    },
    "llama4": _BASE
    | {
        "model_type": "llama4_text",
        "num_hidden_layers": 4,
        "head_dim": 32,
        "attention_chunk_size": 36,
        "floor_scale": 16,
        "rope_scaling": _LLAMA3_ROPE,
        "rope_theta": 500000.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "interleave_moe_layer_step": 2,
        "intermediate_size": 32,
        "intermediate_size_mlp": 96,
    },
    "mimo_v2_flash": _BASE
    | {
        "model_type": "mimo_v2_flash",
        "rope_theta": 5e6,
        "num_hidden_layers": 4,
        "head_dim": 48,
        "v_head_dim": 32,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "sliding_window": 20,
        "num_key_value_heads": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
    },
    "deepseek_v32": _BASE | _LATENT | _DEEPSEEK_V3 | _INDEXER | {"model_type": "deepseek_v32"},
    "glm_moe_dsa": _BASE
    | _LATENT
    | _DEEPSEEK_V3
    | _INDEXER
    | {"model_type": "glm_moe_dsa", "indexer_types": ["full", "shared", "full"]},
    "glm4_moe_lite": _BASE
    | _LATENT
    | {
        "model_type": "glm4_moe_lite",
        "q_lora_rank": 40,
        "num_nextn_predict_layers": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.8,
    },
    "exaone_moe": _BASE
    | {
        "model_type": "exaone_moe",
        "num_hidden_layers": 4,
        "sliding_window": 18,
        "sliding_window_pattern": 2,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "num_shared_experts": 1,
        "moe_intermediate_size": 32,
        "routed_scaling_factor": 1.5,
    },
    "hunyuan_v1_dense": _BASE
    | {
        "model_type": "hunyuan_v1_dense",
        "head_dim": 32,
        "attention_bias": True,
        "rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0},
    },
    "hunyuan_v1_moe": _BASE
    | {
        "model_type": "hunyuan_v1_moe",
        "head_dim": 32,
        "num_experts": 8,
        "moe_topk": [2, 3, 2],
        "intermediate_size": 96,
        "tie_word_embeddings": True,
    },
    "mistral4": _BASE
    | _LATENT
    | {
        "model_type": "mistral4",
        "q_lora_rank": 40,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "norm_topk_prob": True,
        "rope_parameters": _YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5},
        "rope_theta": None,
    },
    "exaone4": _BASE
    | {
        "model_type": "exaone4",
        "num_hidden_layers": 4,
        "sliding_window": 18,
        "sliding_window_pattern": 2,
        "rope_scaling": _LLAMA3_ROPE,
    },
    "exaone4_no_windows": _BASE
    | {"model_type": "exaone4", "sliding_window": None, "layer_types": ["full_attention"] * 3},
    "cohere2_moe": _BASE
    | {
        "model_type": "cohere2_moe",
        "num_hidden_layers": 4,
        "head_dim": 32,
        "sliding_window": 18,
        "sliding_window_pattern": 2,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "num_shared_experts": 1,
        "expert_selection_fn": "sigmoid",
        "intermediate_size": 48,
        "prefix_dense_intermediate_size": 96,
        "first_k_dense_replace": 1,
        "rms_norm_eps": None,
        "tie_word_embeddings": True,
    },
    "qwen3_next": _BASE
    | _DELTA
    | {
        "model_type": "qwen3_next",
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "mlp_only_layers": [1],
    },
    "qwen3_5_moe": _BASE
    | _DELTA
    | {
        "model_type": "qwen3_5_moe_text",
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
    },
    "qwen3_5": _BASE | _DELTA | {"model_type": "qwen3_5_text", "head_dim": 32},
    "nemotron_h": _BASE
    | {
        "model_type": "nemotron_h",
        "num_hidden_layers": None,
        "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp"],
        "intermediate_size": 96,
        "head_dim": 32,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 16,
    },
    "nemotron_h_experts": _BASE | _NEMOTRON_EXPERTS | {"n_group": 4, "topk_group": 2},
    "nemotron_h_latent": _BASE | _NEMOTRON_EXPERTS | {"moe_latent_size": 32},
    "kimi_linear": {
        name: value for name, value in _BASE.items() if name not in {"max_position_embeddings", "rope_theta"}
    }
    | {
        "model_type": "kimi_linear",
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 24,
        "linear_attn_config": {
            "full_attn_layers": [2],
            "kda_layers": [1, 3],
            "head_dim": 8,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
        "num_experts": 8,
        "num_experts_per_token": 3,
        "num_shared_experts": 2,
        "num_expert_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 32,
        "moe_renormalize": True,
        "model_max_length": 512,
        "pad_token_id": 0,
    },
    "bamba": _BASE
    | _MAMBA
    | {
        "model_type": "bamba",
        "attn_layer_indices": [1],
        "mamba_n_groups": 2,
        "mamba_proj_bias": True,
        "attention_bias": True,
        "head_dim": None,
        "pad_token_id": 0,
    },
    "granitemoehybrid": _BASE | _MAMBA | _GRANITE_HYBRID | {"num_local_experts": 0, "position_embedding_type": "rope"},
    "granitemoehybrid_experts": _BASE
    | _MAMBA
    | _GRANITE_HYBRID
    | {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 32, "mamba_n_groups": 2},
    "olmo_hybrid": _BASE | _DELTA | {"model_type": "olmo_hybrid", "pad_token_id": 0},
    "lfm2": _BASE
    | {
        "model_type": "lfm2",
        "layer_types": ["conv", "full_attention", "conv"],
        "conv_bias": True,
        "block_multiple_of": 32,
        "rms_norm_eps": None,
        "norm_eps": 1e-5,
    },
    "lfm2_moe": _BASE
    | {
        "model_type": "lfm2_moe",
        "layer_types": ["conv", "full_attention", "conv"],
        "num_dense_layers": 1,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "routed_scaling_factor": 1.5,
        "rms_norm_eps": None,
        "norm_eps": 1e-5,
    },
}
"""Configurations as in Hugging Face checkpoints, with the field names of transformers 4 (`yarn`: 5), by family."""


def write_tiny_model(folder: Path, family: str = "llama3", seed: int = 0, **changes: object) -> Path:
    """Write a loadable folder (config.json, model.safetensors) with random weights; `changes` override the config."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {key: value for key, value in (FAMILIES[family] | changes).items() if value is not None or key in _NULLS}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = random_weights(config, seed)
    write_float32(
        folder / "model.safetensors", {name: tensor.shape for name, tensor in tensors.items()}, tensors.values()
    )
    return folder


def random_weights(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Return float32 weights of a configuration by checkpoint name, scaled so that activations stay near 1."""
    parsed = parse_spec(config, {})
    places = slots_of(parsed, allocate_parameters(parsed, torch.float32, torch.device("meta")))
    rng = np.random.default_rng(seed)
    return {
        # Checkpoints of the older Gemmas store norms minus 1.
        name: _random_tensor(
            rng, name, place.stored_shape, 0.0 if parsed.wide_norms and place.transform is not None else 1.0
        )
        for name, place in places.items()
    }


def tiny_engine_config(folder: Path, **changes: Any) -> EngineConfig:
    """Return an engine configuration with one thread, one megabyte of KV cache, and otherwise defaults."""
    return EngineConfig.of(folder, **({"threads": 1, "kv_cache_bytes": 1 << 20} | changes))


def draw(index: int = 0, **changes: Any) -> SamplingInput:
    """Return the sampling input number `index`, greedy unless `changes` override its SamplingParams."""
    return SamplingInput(SamplingParams(**({"max_tokens": 64} | changes)), index)


def row(token_ids: list[int], start: int, page_ids: list[int], *, drawn: bool = True) -> StepRow:
    """Return a row with greedy sampling or, without `drawn`, a row that samples no token."""
    return StepRow(token_ids, start, page_ids, draw() if drawn else None)


def _random_tensor(rng: np.random.Generator, name: str, shape: tuple[int, ...], centre: float) -> np.ndarray:
    values = rng.standard_normal(shape, dtype=np.float32)
    if "norm" in name:
        return centre + values / 10
    if name.endswith("layer_scalar"):
        return 1.0 + values / 10
    if "correction_bias" in name or "expert_bias" in name:
        return values / 10
    if name.endswith("router.scale"):  # Gemma 4's router divides by this root
        return values * np.float32(math.sqrt(shape[0]))
    scale = 1.0 if len(shape) == 1 or "embed" in name else 1 / math.sqrt(shape[-1])
    return (values * scale).astype(np.float32)


def greedy_answer(runner: ModelRunner, prompt: Sequence[int], tokens: int, adapter: int = 0) -> list[int]:
    """Return the tokens of an answer that one engine computes, with the prompt in chunks of 32 tokens.

    `adapter` is the number of an adapter; 0 = none.
    """
    pages = list(range(runner.kv_pages.numbers(len(prompt) + tokens) * runner.kv_pages.groups))
    token_ids, start = list(prompt), 0
    while len(token_ids) < len(prompt) + tokens:
        chunk = token_ids[start : start + 32]
        last = start + len(chunk) == len(token_ids)
        drawn = draw(index=len(token_ids) - len(prompt)) if last else None
        (token,) = runner.run(StepBatch([StepRow(chunk, start, pages, drawn, adapter=adapter)])).token_ids
        start += len(chunk)
        token_ids += [] if token is None else [token]
    return token_ids[len(prompt) :]
