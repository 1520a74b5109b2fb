"""Translates GGUF metadata and tensor names to those of Hugging Face checkpoints."""

import math
import re
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import numpy.typing as npt

from tandem.protocol.errors import ModelError

Read = Callable[[str], Any]
"""A function that returns the value of a metadata key; None if the file does not have the key."""

_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"
"""The tensor with Llama 3's RoPE scaling; GGUF stores the divisors of frequencies instead of the parameters."""


def huggingface_name(name: str) -> str:
    """Return the checkpoint's name for a GGUF tensor. Raises ModelError if no supported model has the tensor."""
    if name in _TOP_LEVEL:
        return _TOP_LEVEL[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in _IN_LAYER:
        raise ModelError(f"tensor {name} is not one of a {', '.join(_ARCHITECTURES)} model.")
    return f"model.layers.{match[1]}.{_IN_LAYER[match[2]]}.{match[3]}"


def huggingface_config(
    read: Read, vocab_size: int, tensors: Collection[str], rope_factors: npt.NDArray[np.float32] | None
) -> dict[str, Any]:
    """Return the contents of config.json for a GGUF file. Raises ModelError if the model is not supported.

    `vocab_size` is the number of rows of the embedding, `rope_factors` the values of `ROPE_FACTORS` if the file has
    them.
    """
    kind = read("general.architecture")
    if kind not in _ARCHITECTURES or read(f"{kind}.expert_count"):
        raise ModelError(f"architecture {kind} is not supported; supported ones are {', '.join(_ARCHITECTURES)}.")

    def need(key: str) -> Any:
        value = read(f"{kind}.{key}")
        if value is None:
            raise ModelError(f"its metadata lacks {kind}.{key}; convert the model to GGUF again.")
        return value

    heads, hidden = need("attention.head_count"), need("embedding_length")
    head_dim = read(f"{kind}.attention.key_length") or hidden // heads
    if (read(f"{kind}.rope.dimension_count") or head_dim) != head_dim:
        raise ModelError("rotary embedding of a part of each head is not supported.")
    return {
        "model_type": kind,
        "architectures": [
            {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[kind]
        ],
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": read(f"{kind}.attention.head_count_kv") or heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": need("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": need("context_length"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "rope_theta": read(f"{kind}.rope.freq_base") or 10000.0,
        "rope_scaling": _rope_scaling(read, kind, rope_factors),
        "bos_token_id": read("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos_token_ids(read) or None,
        "torch_dtype": "float32",
    }


def eos_token_ids(read: Read) -> list[int]:
    """Return the ids of the end-of-sequence token and, in chat models, of the end-of-turn token."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    return sorted({int(value) for value in map(read, keys) if value is not None})


def _rope_scaling(read: Read, kind: str, factors: npt.NDArray[np.float32] | None) -> dict[str, Any] | None:
    if factors is not None:
        return _llama3_scaling(factors, read(f"{kind}.rope.freq_base") or 10000.0)
    scaling = read(f"{kind}.rope.scaling.type")
    if scaling in {None, "none"}:
        return None
    settings: dict[str, Any] = {"rope_type": scaling, "factor": read(f"{kind}.rope.scaling.factor")}
    original = read(f"{kind}.rope.scaling.original_context_length")
    return settings | ({"original_max_position_embeddings": original} if original else {})


def _llama3_scaling(factors: npt.NDArray[np.float32], theta: float) -> dict[str, Any]:
    """Return the parameters of Llama 3 scaling that yield these divisors.

    Every Llama 3.x blends frequencies between 1 and 4 turns in 8192 tokens.
    """
    scaling = {
        "rope_type": "llama3",
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    turns = 8192 / (2 * math.pi) * theta ** -(np.arange(len(factors)) / len(factors))
    blend = ((turns - 1.0) / 3.0).clip(0, 1)
    if not np.allclose(1 / ((1 - blend) / scaling["factor"] + blend), factors, rtol=1e-3):
        raise ModelError(f"the RoPE divisors in {ROPE_FACTORS} are not those of Llama 3, and no others are supported.")
    return scaling
