"""Translates GGUF metadata to config.json, and GGUF tensor names to those of Hugging Face checkpoints."""

import math
import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tandem.engine.weights.gguf_architectures import architecture_of
from tandem.engine.weights.gguf_layout import LAYER_NAMES, Architecture, Metadata, Read
from tandem.engine.weights.gguf_states import state_fields
from tandem.protocol.errors import ModelError

_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output_norm.bias": "model.norm.bias",
    "output.weight": "lm_head.weight",
}
ROPE_FACTORS = "rope_freqs.weight"
"""The tensor with Llama 3's RoPE scaling; GGUF stores the divisors of frequencies instead of the parameters."""
LONGROPE_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")
"""The tensors with LongRoPE's divisors of frequencies, for short and for long contexts."""
_LARGEST_GEMMAS = {"gemma2": 46, "gemma3_text": 62}
"""The number of layers of the models of 27 billion parameters, which scale queries by their hidden size per head."""
_LLAMA4_MAVERICK_EXPERTS = 128


def huggingface_name(name: str, architecture: Architecture) -> str:
    """Return the checkpoint's name for a GGUF tensor, in which `{}` stands for the number of an expert.

    Raises ModelError if no supported model has the tensor.
    """
    outside = {**_TOP_LEVEL, **architecture.outside}
    if name in outside:
        return outside[name]
    names = {**LAYER_NAMES, **architecture.names}
    match = re.fullmatch(r"blk\.(\d+)\.([\w.]+)\.(weight|bias)", name)
    if match is not None:
        number, module, kind = match.groups()
        if f"{module}.{kind}" in names:
            return f"{architecture.layers}{number}." + names[f"{module}.{kind}"]
        if module in names:
            return f"{architecture.layers}{number}.{names[module]}.{kind}"
    raise ModelError(f"tensor {name} is not one of a {architecture.model_type} model.")


def layer_of(name: str) -> int | None:
    """Return the number of a GGUF tensor's layer; None if it is outside of the layers."""
    match = re.match(r"blk\.(\d+)\.", name)
    return None if match is None else int(match[1])


def number_of_layers(read: Read) -> int:
    """Return the number of layers without those of multi-token prediction, which come last and are not served."""
    metadata = Metadata(read)
    return int(metadata.need("block_count")) - int(metadata.get("nextn_predict_layers", 0))


def huggingface_config(
    read: Read, vocab_size: int, tensors: Collection[str], rope_factors: Mapping[str, npt.NDArray[np.float32]]
) -> dict[str, Any]:
    """Return the contents of config.json for a GGUF file. Raises ModelError if the model is not supported.

    `vocab_size` is the number of rows of the embedding, `rope_factors` the values of the tensors in `ROPE_FACTORS` and
    `LONGROPE_FACTORS` that the file has.
    """
    architecture, metadata = architecture_of(read), Metadata(read)
    for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        if isinstance(metadata.get(key), list) and not architecture.per_layer:
            raise ModelError(f"{key} differs from layer to layer, which is not supported.")
    heads, hidden = metadata.need("attention.head_count"), metadata.need("embedding_length")
    norm_eps = metadata.get("attention.layer_norm_epsilon")
    norm_eps = metadata.need("attention.layer_norm_rms_epsilon") if norm_eps is None else norm_eps
    head_dim = metadata.get("attention.key_length") or hidden // heads
    return {
        **architecture.defaults,
        "model_type": architecture.model_type,
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": metadata.largest("feed_forward_length") or metadata.need("expert_feed_forward_length"),
        "num_hidden_layers": number_of_layers(read),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.largest("attention.head_count_kv") or heads,
        "head_dim": head_dim,
        "hidden_act": architecture.defaults.get("hidden_act", "silu"),
        "rms_norm_eps": norm_eps,
        "max_position_embeddings": metadata.need("context_length"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "attention_out_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "rope_theta": metadata.get("rope.freq_base") or 10000.0,
        "rope_scaling": _rope_scaling(metadata, architecture, rope_factors),
        "bos_token_id": read("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos_token_ids(read) or None,
        "torch_dtype": "float32",
        **_windows(metadata, number_of_layers(read)),
        **_rotated(metadata, architecture, head_dim),
        **_experts(metadata),
        **_of_family(metadata, architecture.model_type, norm_eps, tensors),
        **state_fields(metadata, architecture.model_type, norm_eps, number_of_layers(read), tensors),
    }


def eos_token_ids(read: Read) -> list[int]:
    """Return the ids of the end-of-sequence token and, in chat models, of the end-of-turn token."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    return sorted({int(value) for value in map(read, keys) if value is not None})


def _windows(metadata: Metadata, layers: int) -> dict[str, Any]:
    """Return the window and, if the file has them, the attention types of the layers; else those of the family."""
    window, pattern = metadata.get("attention.sliding_window"), metadata.get("attention.sliding_window_pattern")
    if not window or pattern is None:
        return {"sliding_window": window or None}
    every = [bool(windowed) for windowed in pattern] if isinstance(pattern, list) else None
    windowed = [(number + 1) % pattern != 0 for number in range(layers)] if every is None else every[:layers]
    kinds = ["sliding_attention" if is_windowed else "full_attention" for is_windowed in windowed]
    return {"sliding_window": window, "layer_types": kinds}


def _rotated(metadata: Metadata, architecture: Architecture, head_dim: int) -> dict[str, Any]:
    """Return the fraction of each head that is rotated."""
    rotated = metadata.get("rope.dimension_count") or head_dim
    if metadata.get("attention.kv_lora_rank") or rotated == head_dim or not architecture.rotated:
        return {"partial_rotary_factor": 1.0}
    if architecture.permuted:
        raise ModelError("rotary embedding of a part of each head is not supported.")
    return {"partial_rotary_factor": rotated / head_dim}


def _experts(metadata: Metadata) -> dict[str, Any]:
    if not metadata.get("expert_count"):
        return {}
    return {
        "num_experts": metadata.need("expert_count"),
        "num_local_experts": metadata.need("expert_count"),
        "num_experts_per_tok": metadata.need("expert_used_count"),
        "moe_intermediate_size": metadata.get("expert_feed_forward_length") or metadata.need("feed_forward_length"),
        **metadata.given(
            norm_topk_prob="expert_weights_norm",
            routed_scaling_factor="expert_weights_scale",
            n_group="expert_group_count",
            topk_group="expert_group_used_count",
            n_shared_experts="expert_shared_count",
            first_k_dense_replace="leading_dense_block_count",
        ),
    }


def _of_family(metadata: Metadata, model_type: str, norm_eps: float, tensors: Collection[str]) -> dict[str, Any]:
    """Return the fields of config.json that only one family has, or only some."""
    fields: dict[str, Any] = {}
    match model_type:
        case "gemma2" | "gemma3_text":
            heads, hidden = metadata.need("attention.head_count"), metadata.need("embedding_length")
            largest = metadata.need("block_count") == _LARGEST_GEMMAS[model_type]
            scalar = hidden // heads if largest else metadata.get("attention.key_length", 256)
            fields = {"query_pre_attn_scalar": scalar} | metadata.given(
                attn_logit_softcapping="attn_logit_softcapping",
                final_logit_softcapping="final_logit_softcapping",
                rope_local_base_freq="rope.freq_base_swa",
            )
        case "deepseek_v2" | "deepseek_v3":
            fields = _latent(metadata, model_type)
        case "granite" | "granitemoe" | "granitemoeshared" | "granitemoehybrid":
            head_dim = metadata.need("embedding_length") // metadata.need("attention.head_count")
            fields = {"attention_multiplier": head_dim**-0.5} | metadata.given(
                attention_multiplier="attention.scale",
                embedding_multiplier="embedding_scale",
                residual_multiplier="residual_scale",
                logits_scaling="logit_scale",
                shared_intermediate_size="expert_shared_feed_forward_length",
            )
        case "llama4_text":
            # The file does not say that the models with 128 experts have no norms of queries and keys.
            fields = {
                "intermediate_size_mlp": metadata.need("feed_forward_length"),
                "intermediate_size": metadata.need("expert_feed_forward_length"),
                "use_qk_norm": metadata.need("expert_count") != _LLAMA4_MAVERICK_EXPERTS,
            } | metadata.given(interleave_moe_layer_step="interleave_moe_layer_step")
        case "qwen2_moe":
            fields = {"shared_expert_intermediate_size": metadata.need("expert_shared_feed_forward_length")}
        case "cohere2":
            fields = {"layer_norm_eps": norm_eps} | metadata.given(logit_scale="logit_scale")
        case "nemotron":
            fields = {"norm_eps": norm_eps}
        case "phi3":
            fields = metadata.given(original_max_position_embeddings="rope.scaling.original_context_length")
        case "glm4_moe":
            fields = {"use_qk_norm": "blk.0.attn_q_norm.weight" in tensors}
        case "ernie4_5":
            fields = {"use_bias": "blk.0.attn_q.bias" in tensors}
        case "ernie4_5_moe":
            fields = {
                "moe_num_experts": metadata.need("expert_count"),
                "moe_k": metadata.need("expert_used_count"),
                "moe_num_shared_experts": metadata.get("expert_shared_count", 0),
                "moe_layer_start_index": metadata.get("leading_dense_block_count", 0),
                "moe_layer_interval": metadata.get("interleave_moe_layer_step", 1),
            }
        case "exaone_moe":
            fields = metadata.given(num_shared_experts="expert_shared_count")
    return fields


def _latent(metadata: Metadata, model_type: str) -> dict[str, Any]:
    """Return the fields of latent attention. Old files have the length of a head's keys where new ones the cached."""
    if metadata.get("attention.temperature_scale"):
        raise ModelError("attention.temperature_scale is not supported with latent attention.")
    rotated = metadata.need("rope.dimension_count")
    keys = metadata.get("attention.key_length_mla") or metadata.need("attention.key_length")
    grouped = metadata.get("expert_group_count", 1) > 1
    return {
        "kv_lora_rank": metadata.need("attention.kv_lora_rank"),
        "q_lora_rank": metadata.get("attention.q_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": keys - rotated,
        "v_head_dim": metadata.get("attention.value_length_mla") or metadata.need("attention.value_length"),
        "attention_bias": False,
    } | ({"topk_method": "group_limited_greedy" if grouped else "greedy"} if model_type == "deepseek_v2" else {})


def _rope_scaling(
    metadata: Metadata, architecture: Architecture, factors: Mapping[str, npt.NDArray[np.float32]]
) -> dict[str, Any] | None:
    short, long = LONGROPE_FACTORS
    if long in factors:
        return {
            "rope_type": "longrope",
            "short_factor": factors[short].tolist(),
            "long_factor": factors[long].tolist(),
        } | metadata.given(attention_factor="rope.scaling.attn_factor")
    if ROPE_FACTORS in factors:
        return _llama3_scaling(factors[ROPE_FACTORS], metadata.get("rope.freq_base") or 10000.0)
    scaling = metadata.get("rope.scaling.type")
    if scaling in {None, "none"}:
        return None
    settings = {"rope_type": scaling} | metadata.given(
        factor="rope.scaling.factor",
        original_max_position_embeddings="rope.scaling.original_context_length",
        beta_fast="rope.scaling.yarn_beta_fast",
        beta_slow="rope.scaling.yarn_beta_slow",
        llama_4_scaling_beta="attention.temperature_scale",
    )
    if multiplier := metadata.get("rope.scaling.yarn_log_multiplier"):
        # For latent attention, the file has the product with the 0.1 of YaRN's formula.
        mscale = multiplier * 10 if metadata.get("attention.kv_lora_rank") else multiplier
        settings |= {"mscale": mscale, "mscale_all_dim": mscale}
    # The file does not say that gpt-oss does not round YaRN's limits.
    return settings | ({"truncate": False} if architecture.model_type == "gpt_oss" else {})


def _llama3_scaling(factors: npt.NDArray[np.float32], theta: float) -> dict[str, Any]:
    """Return the parameters of Llama 3 scaling that yield these divisors.

    Every Llama 3.x blends frequencies between 1 and 4 turns in 8192 tokens; Llama 4 changes the divisor at 1 turn.
    """
    factor = float(factors.max())
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    }
    turns = 8192 / (2 * math.pi) * theta ** -(np.arange(len(factors)) / len(factors))
    for highest in (4.0, 1.0):
        blend = np.interp(turns, (1.0, highest), (0.0, 1.0))
        if np.allclose(1 / ((1.0 - blend) / factor + blend), factors, rtol=1e-3):
            return scaling | {"high_freq_factor": highest}
    raise ModelError(f"the RoPE divisors in {ROPE_FACTORS} are not those of Llama 3 or 4, and no others are supported.")
