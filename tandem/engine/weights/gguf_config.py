"""Translates GGUF metadata to config.json, and GGUF tensor names to those of Hugging Face checkpoints."""

import math
import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tandem.engine.weights.gguf_architectures import architecture_of
from tandem.engine.weights.gguf_fields import family_fields, windows
from tandem.engine.weights.gguf_layout import LAYER_NAMES, Architecture, Header, Metadata, Read
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
_MISTRAL4_BETA = 0.1
"""The scaling of Mistral 4's queries by their position, which files lack."""


def huggingface_name(name: str, architecture: Architecture) -> str:
    """Return the checkpoint's name for a GGUF tensor, in which `{}` stands for the number of an expert.

    Raises ModelError if no supported model has the tensor.
    """
    outside = {**_TOP_LEVEL, **architecture.outside}
    if name in outside:
        return outside[name]
    names = {**LAYER_NAMES, **architecture.names}
    match = re.fullmatch(r"blk\.(\d+)\.([\w.]+)\.(weight|bias|scale)", name)
    if match is not None:
        number, module, kind = match.groups()
        if f"{module}.{kind}" in names:
            return f"{architecture.layers}{number}." + names[f"{module}.{kind}"]
        if module in names and kind != "scale":
            return f"{architecture.layers}{number}.{names[module]}.{kind}"
    raise ModelError(f"tensor {name} is not one of a {architecture.model_type} model.")


def layer_of(name: str) -> int | None:
    """Return the number of a GGUF tensor's layer; None if it is outside of the layers."""
    match = re.match(r"blk\.(\d+)\.", name)
    return None if match is None else int(match[1])


def huggingface_config(
    read: Read, vocab_size: int, tensors: Collection[str], rope_factors: Mapping[str, npt.NDArray[np.float32]]
) -> dict[str, Any]:
    """Return the contents of config.json for a GGUF file. Raises ModelError if the model is not supported.

    `vocab_size` is the number of rows of the embedding, `rope_factors` the values of the tensors in `ROPE_FACTORS` and
    `LONGROPE_FACTORS` that the file has.
    """
    architecture, metadata = architecture_of(read), Header(read, tensors)
    for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        if isinstance(metadata.get(key), list) and not architecture.per_layer:
            raise ModelError(f"{key} differs from layer to layer, which is not supported.")
    heads, hidden = metadata.need("attention.head_count"), metadata.need("embedding_length")
    head_dim = metadata.get("attention.key_length") or hidden // heads
    return {
        **architecture.defaults,
        "model_type": architecture.model_type,
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": metadata.largest("feed_forward_length") or metadata.need("expert_feed_forward_length"),
        "num_hidden_layers": metadata.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.largest("attention.head_count_kv") or heads,
        "head_dim": head_dim,
        "hidden_act": architecture.defaults.get("hidden_act", "silu"),
        "rms_norm_eps": metadata.norm_eps,
        "max_position_embeddings": metadata.need("context_length"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "attention_out_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "rope_theta": metadata.get("rope.freq_base") or 10000.0,
        **_ropes(metadata, architecture, rope_factors),
        "bos_token_id": read("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos_token_ids(read) or None,
        "torch_dtype": "float32",
        **windows(metadata),
        **_rotated(metadata, architecture, head_dim),
        **_experts(metadata),
        **family_fields(metadata, architecture.model_type),
    }


def eos_token_ids(read: Read) -> list[int]:
    """Return the ids of the end-of-sequence token and, in chat models, of the end-of-turn token."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    return sorted({int(value) for value in map(read, keys) if value is not None})


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


def _ropes(
    metadata: Metadata, architecture: Architecture, factors: Mapping[str, npt.NDArray[np.float32]]
) -> dict[str, Any]:
    """Return the RoPE settings of all layers, or of Gemma 4's layers with and without a window."""
    if architecture.model_type != "gemma4_text":
        return {"rope_scaling": _rope_scaling(metadata, architecture, factors)}
    if ROPE_FACTORS not in factors:
        raise ModelError(f"it lacks {ROPE_FACTORS}; convert the model to GGUF again.")
    # Layers without a window have a divisor for each pair of dimensions: 1, or a number that stops the rotation.
    rotated = float((factors[ROPE_FACTORS] == 1).mean())
    full = {"rope_type": "proportional", "partial_rotary_factor": rotated, "rope_theta": metadata.get("rope.freq_base")}
    windowed = {"rope_type": "default", "rope_theta": metadata.get("rope.freq_base_swa")}
    return {"rope_parameters": {"full_attention": full, "sliding_attention": windowed}}


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
    if architecture.model_type == "mistral4":
        settings = {"llama_4_scaling_beta": _MISTRAL4_BETA} | settings
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
