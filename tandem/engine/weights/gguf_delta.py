"""The GGUF architectures of models with Gated DeltaNet (Qwen3-Next, Qwen3.5) or Kimi Delta Attention."""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tandem.engine.weights.gguf_layout import STACKED_EXPERTS, Architecture, Fields, Header, Join, Metadata, unchanged
from tandem.engine.weights.gguf_states import decay_log, kernel, state_joins, state_names
from tandem.protocol.errors import ModelError

_ATTENTION_INTERVAL = 4
"""One in this number of layers has attention if the file does not say otherwise, as in llama.cpp."""
_MODULE = "linear_attn"
_NAMES = {f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")} | state_names(
    _MODULE
)
SHARED_GATE = Join(("ffn_gate_inp_shexp.weight",), "mlp.shared_expert_gate.weight", lambda gate: gate.reshape(1, -1))
"""The gate of the shared expert, which files store as a vector."""
KIMI_NAMES = {
    "ssm_f_a": "self_attn.f_a_proj",
    "ssm_f_b": "self_attn.f_b_proj",
    "ssm_g_a": "self_attn.g_a_proj",
    "ssm_g_b": "self_attn.g_b_proj",
    "ssm_beta": "self_attn.b_proj",
    "ssm_dt.bias": "self_attn.dt_bias",
    "ssm_norm": "self_attn.o_norm",
}
KIMI_JOINS = (
    *(Join((f"ssm_conv1d_{part}.weight",), f"self_attn.{part}_conv1d.weight", kernel) for part in "qkv"),
    Join(("ssm_a",), "self_attn.A_log", lambda decay: decay_log(decay).reshape(1, 1, -1, 1)),
)


def _qwen3_next(metadata: Metadata) -> Architecture:
    """Return the architecture of a Qwen3-Next file, whose number of key heads decides the order of rows."""
    heads = int(metadata.need("ssm.group_count"))
    values = int(metadata.need("ssm.inner_size"))
    rows = (int(metadata.need("ssm.state_size")),) * 2 + (values // heads,)
    interleave = partial(_rows_by_head, heads, rows)
    return Architecture(
        "qwen3_next",
        _NAMES | {"ssm_in": f"{_MODULE}.in_proj_qkvz", "ssm_ba": f"{_MODULE}.in_proj_ba"},
        norms_plus_one=True,
        joins=(
            *state_joins(_MODULE),
            Join(("attn_qkv.weight", "attn_gate.weight"), f"{_MODULE}.in_proj_qkvz.weight", interleave),
            SHARED_GATE,
        ),
        defaults={"norm_topk_prob": True},
    )


def _rows_by_head(heads: int, rows: Collection[int], qkv: Tensor, gate: Tensor) -> Tensor:
    """Return the rows of q, k, v and the gate of each key head in turn; `rows` has one head's number of q, k and v."""
    parts = (*torch.split(qkv, [heads * count for count in rows]), gate)
    return torch.cat([part.reshape(heads, -1, part.shape[-1]) for part in parts], dim=1).flatten(0, 1)


def _qwen3_5(metadata: Metadata) -> Architecture:
    """Return the architecture of a Qwen3.5 file, which stores the value heads in another order than checkpoints.

    Files have the first value head of every key head, then the second of every key head; checkpoints have all value
    heads of the first key head, then those of the second.
    """
    keys, heads = int(metadata.need("ssm.group_count")), int(metadata.need("ssm.time_step_rank"))
    if keys < 1 or heads < 1 or heads % keys:
        raise ModelError(f"ssm.time_step_rank {heads} is not a multiple of ssm.group_count {keys}.")
    key_rows = 2 * keys * int(metadata.need("ssm.state_size"))
    order = partial(_by_key_head, keys, heads)

    def after_keys(weight: Tensor) -> Tensor:
        return torch.cat((weight[:key_rows], order(weight[key_rows:])))

    columns = int(metadata.need("ssm.inner_size")) // heads
    by_columns = partial(_by_key_head, keys, heads, dim=1)
    joins = (
        Join(("attn_qkv.weight",), f"{_MODULE}.in_proj_qkv.weight", after_keys, after_keys),
        Join(("attn_gate.weight",), f"{_MODULE}.in_proj_z.weight", order, order),
        Join(("ssm_alpha.weight",), f"{_MODULE}.in_proj_a.weight", order, order),
        Join(("ssm_beta.weight",), f"{_MODULE}.in_proj_b.weight", order, order),
        Join(("ssm_out.weight",), f"{_MODULE}.out_proj.weight", by_columns, by_columns, moved_columns=columns),
        Join(("ssm_conv1d.weight",), f"{_MODULE}.conv1d.weight", lambda weight: kernel(after_keys(weight))),
        Join(("ssm_a",), f"{_MODULE}.A_log", lambda decay: order(decay_log(decay))),
        Join(("ssm_dt.bias",), f"{_MODULE}.dt_bias", order),
        # The converter adds 1 to the other norms only.
        Join(("ssm_norm.weight",), f"{_MODULE}.norm.weight", unchanged),
        # The converter adds 1 to the other norms only.
        Join(("ssm_norm.weight",), f"{_MODULE}.norm.weight", unchanged),
        SHARED_GATE,
        *STACKED_EXPERTS,
    )
    kind = "qwen3_5_moe_text" if metadata.get("expert_count") else "qwen3_5_text"
    return Architecture(kind, _NAMES, norms_plus_one=True, joins=joins)


def _by_key_head(keys: int, heads: int, weight: Tensor, dim: int = 0) -> Tensor:
    """Return a weight whose value heads lie along `dim`, ordered by their key head instead of their number in it."""
    return torch.unflatten(weight, dim, (heads // keys, keys, -1)).transpose(dim, dim + 1).flatten(dim, dim + 2)


DELTA_ARCHITECTURES: Mapping[str, Callable[[Metadata], Architecture]] = {
    "qwen3next": _qwen3_next,
    "qwen35": _qwen3_5,
    "qwen35moe": _qwen3_5,
}
"""The architectures with Gated DeltaNet, in which the number of heads decides the order of rows."""


def _delta_net(header: Header) -> dict[str, Any]:
    every, heads = header.get("full_attention_interval", _ATTENTION_INTERVAL), int(header.need("ssm.time_step_rank"))
    fields = {
        "layer_types": [
            "linear_attention" if number % every else "full_attention" for number in range(1, header.layers + 1)
        ],
        "linear_num_key_heads": header.need("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": header.need("ssm.state_size"),
        "linear_value_head_dim": header.need("ssm.inner_size") // heads,
        "linear_conv_kernel_dim": header.need("ssm.conv_kernel"),
    }
    if header.get("expert_count"):
        fields["shared_expert_intermediate_size"] = header.need("expert_shared_feed_forward_length")
    return fields


DELTA_FIELDS: Mapping[str, Fields] = dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _delta_net)
"""The fields of models with Gated DeltaNet by their `model_type`."""


def kimi_fields(header: Header) -> dict[str, Any]:
    """Return the fields of Kimi Delta Attention."""
    return {
        "linear_attn_config": {
            # The numbers are counted from 1.
            "full_attn_layers": [number for number, heads in enumerate(header.kv_heads(), start=1) if heads],
            "num_heads": header.need("attention.head_count"),
            "head_dim": header.need("kda.head_dim"),
            "short_conv_kernel_size": header.need("ssm.conv_kernel"),
        }
    }
