"""The GGUF architectures of models with state layers: Mamba-2, gated short convolutions and Gated DeltaNet."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tandem.engine.weights.gguf_layout import Architecture, Join, Metadata
from tandem.protocol.errors import ModelError

_ATTENTION_INTERVAL = 4
"""Every so many layers of Qwen3-Next one has attention if the file does not say otherwise, as in llama.cpp."""


def _kernel(weight: Tensor) -> Tensor:
    """Return the kernel of a convolution, [channels, 1, width], from [channels, width]."""
    return weight.unsqueeze(1)


def _decay_log(decay: Tensor) -> Tensor:
    """Return A_log [heads] from -exp(A_log), [heads] or [heads, 1]."""
    return (-decay).log().flatten()


def _state_joins(module: str) -> tuple[Join, ...]:
    return (
        Join(("ssm_conv1d.weight",), f"{module}.conv1d.weight", _kernel),
        Join(("ssm_a",), f"{module}.A_log", _decay_log),
        Join(("ssm_d",), f"{module}.D", Tensor.flatten),
        Join(("ssm_norm.weight",), f"{module}.norm.weight", Tensor.flatten),
    )


def _state_names(module: str) -> dict[str, str]:
    return {
        "ssm_in": f"{module}.in_proj",
        "ssm_conv1d.bias": f"{module}.conv1d.bias",
        "ssm_dt.bias": f"{module}.dt_bias",
        "ssm_out": f"{module}.out_proj",
    }


def shared_gate_up(gate: str, up: str) -> Join:
    """Return the join of the gate and up projection of Granite's shared expert, which checkpoints store as one."""
    return Join((gate, up), "shared_mlp.input_linear.weight", lambda *parts: torch.cat(parts))


_LFM2 = Architecture(
    "lfm2",
    {
        "attn_norm": "operator_norm",
        "ffn_norm": "ffn_norm",
        "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm",
        "attn_output": "self_attn.out_proj",
        "shortconv.in_proj": "conv.in_proj",
        "shortconv.out_proj": "conv.out_proj",
        "ffn_gate": "feed_forward.w1",
        "ffn_down": "feed_forward.w2",
        "ffn_up": "feed_forward.w3",
        "ffn_gate_inp": "feed_forward.gate",
        "ffn_gate_exps": "feed_forward.experts.{}.w1",
        "ffn_down_exps": "feed_forward.experts.{}.w2",
        "ffn_up_exps": "feed_forward.experts.{}.w3",
        "exp_probs_b.bias": "feed_forward.expert_bias",
    },
    outside={"token_embd_norm.weight": "model.embedding_norm.weight"},
    per_layer=True,
    joins=(Join(("shortconv.conv.weight",), "conv.conv.weight", _kernel),),
)
_NEMOTRON_H = Architecture(
    "nemotron_h",
    {
        "attn_norm": "norm",
        "attn_q": "mixer.q_proj",
        "attn_k": "mixer.k_proj",
        "attn_v": "mixer.v_proj",
        "attn_output": "mixer.o_proj",
        "ffn_up": "mixer.up_proj",
        "ffn_down": "mixer.down_proj",
        "ffn_gate_inp": "mixer.gate",
        "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
        "ffn_up_exps": "mixer.experts.{}.up_proj",
        "ffn_down_exps": "mixer.experts.{}.down_proj",
        "ffn_up_shexp": "mixer.shared_experts.up_proj",
        "ffn_down_shexp": "mixer.shared_experts.down_proj",
        "ffn_latent_down": "mixer.fc1_latent_proj",
        "ffn_latent_up": "mixer.fc2_latent_proj",
    }
    | _state_names("mixer"),
    layers="backbone.layers.",
    outside={"token_embd.weight": "backbone.embeddings.weight", "output_norm.weight": "backbone.norm_f.weight"},
    permuted=True,
    rotated=False,
    per_layer=True,
    joins=_state_joins("mixer"),
)
GRANITE_EXPERT_NAMES = {
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_down_exps.weight": "block_sparse_moe.output_linear.weight",
}
GRANITE_EXPERTS = Join(
    ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    "block_sparse_moe.input_linear.weight",
    lambda gate, up: torch.cat((gate, up), dim=1),
)
GRANITE_SHARED = shared_gate_up("ffn_gate_shexp.weight", "ffn_up_shexp.weight")
_GRANITE_HYBRID = Architecture(
    "granitemoehybrid",
    GRANITE_EXPERT_NAMES
    | {"ffn_down": "shared_mlp.output_linear", "ffn_down_shexp": "shared_mlp.output_linear"}
    | _state_names("mamba"),
    permuted=True,
    rotated=False,
    per_layer=True,
    joins=(
        *_state_joins("mamba"),
        GRANITE_EXPERTS,
        GRANITE_SHARED,
        shared_gate_up("ffn_gate.weight", "ffn_up.weight"),
    ),
)
_QWEN3_NEXT = Architecture(
    "qwen3_next",
    {f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")}
    | _state_names("linear_attn")
    | {"ssm_in": "linear_attn.in_proj_qkvz", "ssm_ba": "linear_attn.in_proj_ba"},
    norms_plus_one=True,
    defaults={"norm_topk_prob": True},
)

STATE_ARCHITECTURES: Mapping[str, Architecture] = {
    "lfm2": _LFM2,
    "lfm2moe": replace(_LFM2, model_type="lfm2_moe"),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
    "granitehybrid": _GRANITE_HYBRID,
    "qwen3next": _QWEN3_NEXT,
}


def qwen3_next(metadata: Metadata) -> Architecture:
    """Return the architecture of a Qwen3-Next file, whose number of key heads decides the order of rows."""
    heads = int(metadata.need("ssm.group_count"))
    values = int(metadata.need("ssm.inner_size"))
    rows = (int(metadata.need("ssm.state_size")),) * 2 + (values // heads,)
    interleave = partial(_rows_by_head, heads, rows)
    return replace(
        _QWEN3_NEXT,
        joins=(
            *_state_joins("linear_attn"),
            Join(("attn_qkv.weight", "attn_gate.weight"), "linear_attn.in_proj_qkvz.weight", interleave),
            Join(("ffn_gate_inp_shexp.weight",), "mlp.shared_expert_gate.weight", lambda gate: gate.reshape(1, -1)),
        ),
    )


def _rows_by_head(heads: int, rows: Collection[int], qkv: Tensor, gate: Tensor) -> Tensor:
    """Return the rows of q, k, v and the gate of each key head in turn; `rows` has one head's number of q, k and v."""
    parts = (*torch.split(qkv, [heads * count for count in rows]), gate)
    return torch.cat([part.reshape(heads, -1, part.shape[-1]) for part in parts], dim=1).flatten(0, 1)


def refuse_bamba(metadata: Metadata) -> None:
    """Raise ModelError for a file of Bamba, which has the architecture of Granite 4 and rotates half of each head."""
    if metadata.get("rope.scaling.finetuned"):
        raise ModelError(
            "Bamba is not supported as a GGUF file, because the order of its rotated dimensions in such files is not"
            " known; serve the folder with safetensors."
        )


def state_fields(
    metadata: Metadata, model_type: str, norm_eps: float, layers: int, tensors: Collection[str]
) -> dict[str, Any]:
    """Return the fields of config.json of a model with state layers; {} for other models."""
    fields: Mapping[str, Callable[[], dict[str, Any]]] = {
        "lfm2": lambda: _lfm2(metadata, norm_eps, layers, tensors),
        "lfm2_moe": lambda: _lfm2(metadata, norm_eps, layers, tensors),
        "nemotron_h": lambda: _nemotron_h(metadata, norm_eps, layers, tensors),
        "granitemoehybrid": lambda: _granite_hybrid(metadata, layers, tensors),
        "qwen3_next": lambda: _qwen3_next_fields(metadata, layers),
    }
    return fields[model_type]() if model_type in fields else {}


def _kv_heads(metadata: Metadata, layers: int) -> list[int]:
    """Return the number of KV heads of each layer, which is 0 in those without attention."""
    heads = metadata.need("attention.head_count_kv")
    if not isinstance(heads, list):
        raise ModelError("attention.head_count_kv must have a value for each layer; convert the model to GGUF again.")
    return heads[:layers]


def _lfm2(metadata: Metadata, norm_eps: float, layers: int, tensors: Collection[str]) -> dict[str, Any]:
    return {
        "norm_eps": norm_eps,
        "layer_types": ["full_attention" if heads else "conv" for heads in _kv_heads(metadata, layers)],
        "conv_L_cache": metadata.need("shortconv.l_cache"),
        "conv_bias": False,
        "block_auto_adjust_ff_dim": False,
        "num_dense_layers": metadata.get("leading_dense_block_count", 0),
        "use_expert_bias": _has(tensors, "exp_probs_b.bias"),
    }


def _has(tensors: Collection[str], name: str) -> bool:
    """Return True if any layer has a tensor of this name."""
    return any(tensor.endswith(f".{name}") for tensor in tensors)


def _nemotron_h(metadata: Metadata, norm_eps: float, layers: int, tensors: Collection[str]) -> dict[str, Any]:
    widths = metadata.need("feed_forward_length")
    if not isinstance(widths, list):
        raise ModelError("feed_forward_length must have a value for each layer; convert the model to GGUF again.")
    network = "moe" if metadata.get("expert_count") else "mlp"
    heads = int(metadata.need("ssm.time_step_rank"))
    return {
        "layers_block_type": [
            "full_attention" if kv_heads else network if width else "linear_attention"
            for kv_heads, width in zip(_kv_heads(metadata, layers), widths, strict=False)
        ],
        "layer_norm_epsilon": norm_eps,
        "mlp_hidden_act": "relu2",
        "mamba_num_heads": heads,
        "mamba_head_dim": metadata.need("ssm.inner_size") // heads,
        "n_groups": metadata.need("ssm.group_count"),
        "ssm_state_size": metadata.need("ssm.state_size"),
        "conv_kernel": metadata.need("ssm.conv_kernel"),
        "use_conv_bias": _has(tensors, "ssm_conv1d.bias"),
        "use_bias": _has(tensors, "ssm_in.bias"),
        "attention_bias": _has(tensors, "attn_q.bias"),
        "mlp_bias": _has(tensors, "ffn_up.bias"),
        "moe_latent_size": metadata.get("moe_latent_size"),
        "moe_shared_expert_intermediate_size": metadata.get("expert_shared_feed_forward_length"),
    }


def _granite_hybrid(metadata: Metadata, layers: int, tensors: Collection[str]) -> dict[str, Any]:
    heads, hidden = int(metadata.need("ssm.time_step_rank")), int(metadata.need("embedding_length"))
    inner = int(metadata.need("ssm.inner_size"))
    kinds = ["full_attention" if kv_heads else "linear_attention" for kv_heads in _kv_heads(metadata, layers)]
    shared = metadata.get("expert_shared_feed_forward_length") or metadata.need("feed_forward_length")
    return {
        "layer_types": kinds,
        "position_embedding_type": "nope",
        "num_local_experts": metadata.get("expert_count", 0),
        "shared_intermediate_size": shared,
        "mamba_expand": inner // hidden,
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": metadata.need("ssm.group_count"),
        "mamba_d_state": metadata.need("ssm.state_size"),
        "mamba_d_conv": metadata.need("ssm.conv_kernel"),
        "mamba_conv_bias": _has(tensors, "ssm_conv1d.bias"),
        "mamba_proj_bias": _has(tensors, "ssm_in.bias"),
        "attention_bias": _has(tensors, "attn_q.bias"),
    }


def _qwen3_next_fields(metadata: Metadata, layers: int) -> dict[str, Any]:
    every, heads = (
        metadata.get("full_attention_interval", _ATTENTION_INTERVAL),
        int(metadata.need("ssm.time_step_rank")),
    )
    return {
        "layer_types": ["linear_attention" if (number + 1) % every else "full_attention" for number in range(layers)],
        "linear_num_key_heads": metadata.need("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": metadata.need("ssm.state_size"),
        "linear_value_head_dim": metadata.need("ssm.inner_size") // heads,
        "linear_conv_kernel_dim": metadata.need("ssm.conv_kernel"),
        "shared_expert_intermediate_size": metadata.need("expert_shared_feed_forward_length"),
    }
