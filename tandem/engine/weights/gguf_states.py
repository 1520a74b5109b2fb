"""The GGUF architectures of models with state layers: Mamba-2 and gated short convolutions."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tandem.engine.weights.gguf_layout import Architecture, Fields, Header, Join, stacked_rows, unchanged
from tandem.protocol.errors import ModelError


def kernel(weight: Tensor) -> Tensor:
    """Return the kernel of a convolution, [channels, 1, width], from one whose other dimensions may be left out."""
    return weight.reshape(-1, 1, weight.shape[-1])


def decay_log(decay: Tensor) -> Tensor:
    """Return A_log [heads] from -exp(A_log), whose other dimensions are 1."""
    return (-decay).log().flatten()


def state_joins(module: str) -> tuple[Join, ...]:
    """Return the weights of a state layer that files store in other shapes; `module` is its name in checkpoints."""
    return (
        Join(("ssm_conv1d.weight",), f"{module}.conv1d.weight", kernel),
        Join(("ssm_a",), f"{module}.A_log", decay_log),
        Join(("ssm_d",), f"{module}.D", Tensor.flatten),
        Join(("ssm_norm.weight",), f"{module}.norm.weight", Tensor.flatten),
    )


def state_names(module: str) -> dict[str, str]:
    """Return the names of the other weights of a state layer."""
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
    joins=(Join(("shortconv.conv.weight",), "conv.conv.weight", kernel),),
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
    | state_names("mixer"),
    layers="backbone.layers.",
    outside={"token_embd.weight": "backbone.embeddings.weight", "output_norm.weight": "backbone.norm_f.weight"},
    permuted=True,
    rotated=False,
    per_layer=True,
    joins=state_joins("mixer"),
)
GRANITE_EXPERT_NAMES = {"ffn_gate_inp": "block_sparse_moe.router.layer"}
GRANITE_EXPERTS = Join(
    ("ffn_gate_exps.weight", "ffn_up_exps.weight"), "block_sparse_moe.input_linear.weight", stacked_rows, stacked_rows
)
GRANITE_DOWN = Join(("ffn_down_exps.weight",), "block_sparse_moe.output_linear.weight", unchanged, unchanged)
GRANITE_SHARED = shared_gate_up("ffn_gate_shexp.weight", "ffn_up_shexp.weight")
_GRANITE_HYBRID = Architecture(
    "granitemoehybrid",
    GRANITE_EXPERT_NAMES
    | {"ffn_down": "shared_mlp.output_linear", "ffn_down_shexp": "shared_mlp.output_linear"}
    | state_names("mamba"),
    permuted=True,
    rotated=False,
    per_layer=True,
    joins=(
        *state_joins("mamba"),
        GRANITE_EXPERTS,
        GRANITE_DOWN,
        GRANITE_SHARED,
        shared_gate_up("ffn_gate.weight", "ffn_up.weight"),
    ),
)
BAMBA = Architecture(
    "bamba",
    {"ffn_norm": "pre_ff_layernorm"}
    | {f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")}
    | state_names("mamba"),
    outside={"output_norm.weight": "model.final_layernorm.weight"},
    permuted=True,
    rotated=False,
    per_layer=True,
    joins=state_joins("mamba"),
)
"""The architecture of Bamba, whose files say that they are Granite 4's."""
STATE_ARCHITECTURES: Mapping[str, Architecture] = {
    "lfm2": _LFM2,
    "lfm2moe": replace(_LFM2, model_type="lfm2_moe"),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
    "granitehybrid": _GRANITE_HYBRID,
}


def _lfm2(header: Header) -> dict[str, Any]:
    return {
        "norm_eps": header.norm_eps,
        "layer_types": ["full_attention" if heads else "conv" for heads in header.kv_heads()],
        "conv_L_cache": header.need("shortconv.l_cache"),
        "conv_bias": False,
        "block_auto_adjust_ff_dim": False,
        "num_dense_layers": header.get("leading_dense_block_count", 0),
        "use_expert_bias": header.has("exp_probs_b.bias"),
    }


def _nemotron_h(header: Header) -> dict[str, Any]:
    widths = header.need("feed_forward_length")
    if not isinstance(widths, list):
        raise ModelError("feed_forward_length must have a value for each layer; convert the model to GGUF again.")
    network = "moe" if header.get("expert_count") else "mlp"
    heads = int(header.need("ssm.time_step_rank"))
    return {
        "layers_block_type": [
            "full_attention" if kv_heads else network if width else "linear_attention"
            for kv_heads, width in zip(header.kv_heads(), widths, strict=False)
        ],
        "layer_norm_epsilon": header.norm_eps,
        "mlp_hidden_act": "relu2",
        "mamba_num_heads": heads,
        "mamba_head_dim": header.need("ssm.inner_size") // heads,
        "n_groups": header.need("ssm.group_count"),
        "ssm_state_size": header.need("ssm.state_size"),
        "conv_kernel": header.need("ssm.conv_kernel"),
        "use_conv_bias": header.has("ssm_conv1d.bias"),
        "use_bias": header.has("ssm_in.bias"),
        "attention_bias": header.has("attn_q.bias"),
        "mlp_bias": header.has("ffn_up.bias"),
        "moe_latent_size": header.get("moe_latent_size"),
        "moe_shared_expert_intermediate_size": header.get("expert_shared_feed_forward_length"),
    }


def granite_hybrid(header: Header) -> dict[str, Any]:
    """Return the fields of Granite 4 that other Granites do not have."""
    kinds = ["full_attention" if heads else "linear_attention" for heads in header.kv_heads()]
    shared = header.get("expert_shared_feed_forward_length") or header.need("feed_forward_length")
    return {
        "layer_types": kinds,
        "position_embedding_type": "nope",
        "num_local_experts": header.get("expert_count", 0),
        "shared_intermediate_size": shared,
        "attention_bias": header.has("attn_q.bias"),
    } | _mamba(header)


def _bamba(header: Header) -> dict[str, Any]:
    return {
        "attn_layer_indices": [number for number, heads in enumerate(header.kv_heads()) if heads],
        "attention_bias": header.has("attn_q.bias"),
    } | _mamba(header)


def _mamba(header: Header) -> dict[str, Any]:
    heads, inner = int(header.need("ssm.time_step_rank")), int(header.need("ssm.inner_size"))
    return {
        "mamba_expand": inner // int(header.need("embedding_length")),
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": header.need("ssm.group_count"),
        "mamba_d_state": header.need("ssm.state_size"),
        "mamba_d_conv": header.need("ssm.conv_kernel"),
        "mamba_conv_bias": header.has("ssm_conv1d.bias"),
        "mamba_proj_bias": header.has("ssm_in.bias"),
    }


STATE_FIELDS: Mapping[str, Fields] = {
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2,
    "nemotron_h": _nemotron_h,
    "bamba": _bamba,
}
"""The fields of models with state layers by their `model_type`."""
