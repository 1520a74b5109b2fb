"""The architectures of GGUF files: their families in Hugging Face checkpoints, tensor names and changed weights."""

from collections.abc import Mapping

import torch
from torch import Tensor

from tandem.engine.weights.gguf_delta import DELTA_ARCHITECTURES, KIMI_JOINS, KIMI_NAMES, SHARED_GATE
from tandem.engine.weights.gguf_layout import (
    STACKED_EXPERTS,
    Architecture,
    Join,
    Metadata,
    Read,
    stacked_rows,
    unchanged,
)
from tandem.engine.weights.gguf_states import (
    BAMBA,
    GRANITE_DOWN,
    GRANITE_EXPERT_NAMES,
    GRANITE_EXPERTS,
    GRANITE_SHARED,
    STATE_ARCHITECTURES,
)
from tandem.protocol.errors import ModelError

_SIGMOID = 2
"""The value of `expert_gating_func` for sigmoid scores."""


def architecture_of(read: Read) -> Architecture:
    """Return the architecture of a file. Raises ModelError, which names it, if it is not supported."""
    kind = read("general.architecture")
    if kind in DELTA_ARCHITECTURES:
        return DELTA_ARCHITECTURES[kind](Metadata(read))
    variants = {
        "llama": (_MIXTRAL, read("llama.expert_count")),
        "olmo2": (_OLMO3, read("olmo2.attention.sliding_window")),
        "deepseek2": (_DEEPSEEK_V2, read("deepseek2.expert_gating_func") != _SIGMOID),
        # Of the models with Mamba-2 layers that have this architecture, only Bamba has a position embedding.
        "granitehybrid": (BAMBA, read("granitehybrid.rope.scaling.finetuned")),
        "granitemoe": (_GRANITE_MOE_SHARED, read("granitemoe.expert_shared_feed_forward_length")),
    }
    variant, applies = variants.get(kind, (None, False))
    if variant is not None and applies:
        return variant
    if kind not in ARCHITECTURES:
        raise ModelError(
            f"architecture {kind} is not supported, because there is no table of its tensor names; supported ones are"
            f" {', '.join((*ARCHITECTURES, *DELTA_ARCHITECTURES))}."
        )
    return ARCHITECTURES[kind]


def _heads_of_latent(keys: Tensor, values: Tensor) -> Tensor:
    """Return the KV up-projection [heads·(nope + v), latent] of keys [heads, latent, nope], values [heads, v, latent].

    Each head's keys come first, then its values.
    """
    return torch.cat((keys.transpose(1, 2), values), dim=1).flatten(0, 1)


def _alternating(gate: Tensor, up: Tensor) -> Tensor:
    """Return [E, 2·I], in which gate and up alternate, from the gate and up biases of experts, [E, I] each."""
    return torch.stack((gate, up), dim=2).flatten(1, 2)


def _alternating_columns(gate: Tensor, up: Tensor) -> Tensor:
    """Return [E, H, 2·I], in which the columns of gate and up alternate, from [E, I, H] each."""
    return _alternating(gate, up).transpose(1, 2)


def _one_row(vector: Tensor) -> Tensor:
    return vector.reshape(1, -1)


_GEMMA_NORMS = {"ffn_norm": "pre_feedforward_layernorm"}
_MIXTRAL_NAMES = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
}
_HUNYUAN_NAMES = {
    "attn_q_norm": "self_attn.query_layernorm",
    "attn_k_norm": "self_attn.key_layernorm",
    "ffn_gate_inp": "mlp.gate.wg",
    "ffn_gate_shexp": "mlp.shared_mlp.gate_proj",
    "ffn_up_shexp": "mlp.shared_mlp.up_proj",
    "ffn_down_shexp": "mlp.shared_mlp.down_proj",
}
_GEMMA4_NAMES = _GEMMA_NORMS | {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "layer_output_scale.weight": "layer_scalar",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
}
_KIMI_NAMES = (
    _MIXTRAL_NAMES
    | {f"ffn_{part}_shexp": f"block_sparse_moe.shared_experts.{part}_proj" for part in ("gate", "up", "down")}
    | {"exp_probs_b.bias": "block_sparse_moe.gate.e_score_correction_bias"}
    | KIMI_NAMES
)
_INDEXER_NAMES = {
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
}
_LATENT_JOIN = (Join(("attn_k_b.weight", "attn_v_b.weight"), "self_attn.kv_b_proj.weight", _heads_of_latent),)
_MIXTRAL = Architecture("mixtral", _MIXTRAL_NAMES, permuted=True)
_OLMO3 = Architecture("olmo3")
_DEEPSEEK_V2 = Architecture("deepseek_v2", joins=_LATENT_JOIN, defaults={"norm_topk_prob": False})
_QWEN3_MOE = Architecture("qwen3_moe", defaults={"norm_topk_prob": True})
_GRANITE_MOE = Architecture("granitemoe", GRANITE_EXPERT_NAMES, permuted=True, joins=(GRANITE_EXPERTS, GRANITE_DOWN))
_GRANITE_MOE_SHARED = Architecture(
    "granitemoeshared",
    GRANITE_EXPERT_NAMES | {"ffn_down_shexp": "shared_mlp.output_linear"},
    permuted=True,
    joins=(GRANITE_EXPERTS, GRANITE_DOWN, GRANITE_SHARED),
)
_LLAMA4 = Architecture(
    "llama4_text",
    {
        "ffn_gate_inp": "feed_forward.router",
        "ffn_gate": "feed_forward.gate_proj",
        "ffn_up": "feed_forward.up_proj",
        "ffn_down": "feed_forward.down_proj",
        "ffn_gate_shexp": "feed_forward.shared_expert.gate_proj",
        "ffn_up_shexp": "feed_forward.shared_expert.up_proj",
        "ffn_down_shexp": "feed_forward.shared_expert.down_proj",
    },
    joins=(
        Join(
            ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
            "feed_forward.experts.gate_up_proj",
            lambda gate, up: stacked_rows(gate, up).transpose(1, 2),
            stacked_rows,
        ),
        Join(("ffn_down_exps.weight",), "feed_forward.experts.down_proj", lambda down: down.transpose(1, 2), unchanged),
    ),
)

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", permuted=True),
    "qwen2": Architecture("qwen2"),
    "qwen2vl": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen3vl": Architecture("qwen3"),
    "qwen2moe": Architecture(
        "qwen2_moe",
        {f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
        joins=(SHARED_GATE,),
        defaults={"norm_topk_prob": False},
    ),
    "qwen3moe": _QWEN3_MOE,
    "qwen3vlmoe": _QWEN3_MOE,
    "mistral3": Architecture("ministral3", permuted=True),
    "gemma": Architecture("gemma", norms_plus_one=True, defaults={"hidden_act": "gelu_pytorch_tanh"}),
    "gemma2": Architecture("gemma2", _GEMMA_NORMS, norms_plus_one=True, defaults={"hidden_act": "gelu_pytorch_tanh"}),
    "gemma3": Architecture(
        "gemma3_text", _GEMMA_NORMS, norms_plus_one=True, defaults={"hidden_act": "gelu_pytorch_tanh"}
    ),
    "gemma4": Architecture(
        "gemma4_text",
        _GEMMA4_NAMES,
        outside={
            "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
            "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
            "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
        },
        per_layer=True,
        joins=(
            Join(("ffn_gate_up_exps.weight",), "experts.gate_up_proj", unchanged, unchanged),
            Join(("ffn_down_exps.weight",), "experts.down_proj", unchanged, unchanged),
        ),
        defaults={"hidden_act": "gelu_pytorch_tanh"},
    ),
    "phi3": Architecture("phi3", {"ffn_up": "mlp.gate_up_proj"}),
    "glm4": Architecture(
        "glm4",
        {
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
    ),
    "glm4moe": Architecture("glm4_moe", defaults={"norm_topk_prob": True}),
    "deepseek2": Architecture("deepseek_v3", joins=_LATENT_JOIN, defaults={"norm_topk_prob": False}),
    "deepseek32": Architecture("deepseek_v32", _INDEXER_NAMES, joins=_LATENT_JOIN, defaults={"norm_topk_prob": False}),
    "glm-dsa": Architecture("glm_moe_dsa", _INDEXER_NAMES, joins=_LATENT_JOIN, defaults={"norm_topk_prob": False}),
    "mistral4": Architecture("mistral4", joins=(*_LATENT_JOIN, *STACKED_EXPERTS), defaults={"norm_topk_prob": False}),
    "kimi-linear": Architecture("kimi_linear", _KIMI_NAMES, per_layer=True, joins=(*_LATENT_JOIN, *KIMI_JOINS)),
    "mimo2": Architecture("mimo_v2_flash", {"attn_sinks.weight": "self_attn.attention_sink_bias"}, per_layer=True),
    "gpt-oss": Architecture(
        "gpt_oss",
        {"ffn_gate_inp": "mlp.router", "ffn_down_exps.bias": "mlp.experts.down_proj_bias"},
        joins=(
            Join(
                ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
                "mlp.experts.gate_up_proj",
                _alternating_columns,
                lambda gate, up: torch.stack((gate, up), dim=2).flatten(1, 2),
            ),
            Join(("ffn_gate_exps.bias", "ffn_up_exps.bias"), "mlp.experts.gate_up_proj_bias", _alternating),
            Join(
                ("ffn_down_exps.weight",),
                "mlp.experts.down_proj",
                lambda down: down.transpose(1, 2),
                unchanged,
            ),
        ),
    ),
    "granite": Architecture("granite", permuted=True),
    "granitemoe": _GRANITE_MOE,
    "cohere2": Architecture("cohere2"),
    # The last product of the shared expert is halved at load.
    "cohere2moe": Architecture(
        "cohere2_moe", joins=(Join(("ffn_down_shexp.weight",), "mlp.shared_experts.down_proj.weight", unchanged),)
    ),
    "nemotron": Architecture("nemotron", norms_plus_one=True, defaults={"hidden_act": "relu2"}),
    "arcee": Architecture("arcee", permuted=True, defaults={"hidden_act": "relu2"}),
    "olmo2": Architecture("olmo2"),
    "olmoe": Architecture("olmoe", defaults={"norm_topk_prob": False}),
    "ernie4_5": Architecture("ernie4_5"),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        joins=(Join(("exp_probs_b.bias",), "mlp.moe_statics.e_score_correction_bias", _one_row),),
    ),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", _HUNYUAN_NAMES),
    "hunyuan-moe": Architecture("hunyuan_v1_moe", _HUNYUAN_NAMES),
    "seed_oss": Architecture("seed_oss"),
    "smollm3": Architecture("smollm3", permuted=True),
    "exaone4": Architecture("exaone4"),
    "exaone-moe": Architecture("exaone_moe", {"exp_probs_b.bias": "mlp.e_score_correction_bias"}),
    "dots1": Architecture("dots1"),
    "llama4": _LLAMA4,
    **STATE_ARCHITECTURES,
    "minimax-m2": Architecture(
        "minimax_m2", _MIXTRAL_NAMES | {"exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"}
    ),
}
"""The supported architectures by the value of `general.architecture`; `architecture_of` knows their variants."""
