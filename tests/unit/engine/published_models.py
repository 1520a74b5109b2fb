"""The sizes of published models as in their config.json, and the table of models by name in docs/models.md."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tandem.engine.config.model import ModelSpec
from tandem.engine.models.allocation import weight_bytes
from tandem.engine.models.load_spec import parse_spec, quantized_at_load
from tandem.engine.models.shapes import shape_config
from tests.factories import FAMILIES
from tests.unit.engine.weights.gguf_files import CASES

Json = dict[str, Any]


def sizes(  # noqa: PLR0917
    kind: str, hidden: int, layers: int, heads: int, kv_heads: int, inner: int, vocab: int, **others: Any
) -> Json:
    """Return a config.json with these sizes; `others` are further fields of it."""
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "vocab_size": vocab,
        "max_position_embeddings": 131072,
    } | others


def experts(count: int, chosen: int, width: int, **others: Any) -> Json:
    """Return the fields of a mixture of experts."""
    return {
        "num_experts": count,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": width,
    } | others


TIED = {"tie_word_embeddings": True}
_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
_DELTA = {"linear_num_key_heads": 16}
_GRANITE = {
    "layer_types": ["attention" if number % 10 == 5 else "mamba" for number in range(40)],
    "mamba_d_state": 128,
    **TIED,
}
_LFM2 = ["full_attention" if number in {2, 6, 10, 14, 18, 21} else "conv" for number in range(24)]
_NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
_SUPER = "MEMEMEM*" + 2 * "EMEMEMEM*" + 4 * "EMEMEMEMEM*" + "EMEMEMEM*EMEMEMEME"
_H_8B = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
_gemma = partial(sizes, head_dim=256, vocab=262208)
_nemotron = partial(sizes, "nemotron_h", head_dim=128, vocab=131072)
_llama4 = partial(sizes, "llama4_text", 5120, 48, 40, 8, 8192, 202048)
_gemma4 = partial(sizes, "gemma4_text", head_dim=256, vocab=262144, hidden_size_per_layer_input=0)
_glm = partial(sizes, "glm4_moe", heads=96, kv_heads=8, vocab=151552, head_dim=128, attention_bias=True)


@dataclass(frozen=True)
class Served:
    """A model that is served."""

    billions: float
    """Its published number of parameters, of the text part, in billions."""
    config: Json | str
    """Its config.json, or the name of a shape in tandem/engine/models/shapes."""
    note: str = ""
    """What else is to say about its files."""

    @property
    def spec(self) -> ModelSpec:
        return shape_config(self.config) if isinstance(self.config, str) else parse_spec(self.config)


@dataclass(frozen=True)
class Refused:
    """A model that is refused, and the part of it that is missing."""

    architecture: str
    missing: str
    config: Json | None = None
    """Its config.json, if the architecture is supported and a field is not."""


MODELS: dict[str, Served | Refused] = {
    "Llama 3.1 8B": Served(8.03, "llama-3.1-8b"),
    "Llama 3.3 70B": Served(70.6, "llama-3-70b"),
    "Llama 3.2 1B": Served(1.24, "llama-3.2-1b"),
    "Llama 3.2 3B": Served(3.21, sizes("llama", 3072, 28, 24, 8, 8192, 128256, head_dim=128, **TIED)),
    "Llama 4 Scout": Served(107.8, _llama4(num_local_experts=16), "text part"),
    "Llama 4 Maverick": Served(400.7, _llama4(num_local_experts=128, interleave_moe_layer_step=2), "text part"),
    "Qwen2.5 7B": Served(7.62, sizes("qwen2", 3584, 28, 28, 4, 18944, 152064)),
    "Qwen2.5 72B": Served(72.7, sizes("qwen2", 8192, 80, 64, 8, 29568, 152064)),
    "Qwen3 0.6B": Served(0.6, "qwen3-0.6b"),
    "Qwen3 8B": Served(8.19, "qwen3-8b"),
    "Qwen3 32B": Served(32.8, "qwen3-32b"),
    "Qwen3 30B-A3B": Served(30.5, "qwen3-30b-a3b"),
    "Qwen3 235B-A22B": Served(
        235.1, sizes("qwen3_moe", 4096, 94, 64, 4, 12288, 151936, head_dim=128, **experts(128, 8, 1536))
    ),
    "Qwen3-Next 80B-A3B": Served(
        79.7,
        sizes("qwen3_next", 2048, 48, 16, 2, 5120, 151936) | experts(512, 10, 512, shared_expert_intermediate_size=512),
    ),
    "Qwen3.5 27B": Served(
        26.9, sizes("qwen3_5_text", 5120, 64, 24, 4, 17408, 248320, linear_num_value_heads=48, **_DELTA), "text part"
    ),
    "Qwen3.5 35B-A3B": Served(
        34.7,
        sizes("qwen3_5_moe_text", 2048, 40, 16, 2, 512, 248320, linear_num_value_heads=32, **_DELTA)
        | experts(256, 8, 512, shared_expert_intermediate_size=512),
        "text part",
    ),
    "Qwen3.5 397B-A17B": Served(
        396.3,
        sizes("qwen3_5_moe_text", 4096, 60, 32, 2, 1024, 248320, linear_num_value_heads=64, **_DELTA)
        | experts(512, 10, 1024, shared_expert_intermediate_size=1024),
        "text part",
    ),
    "gpt-oss 20b": Served(20.9, "gpt-oss-20b", "the published MXFP4 files take 12.9"),
    "gpt-oss 120b": Served(
        116.8,
        sizes("gpt_oss", 2880, 36, 64, 8, 2880, 201088, head_dim=64, sliding_window=128)
        | {"num_local_experts": 128, "num_experts_per_tok": 4},
        "the published MXFP4 files take 61.0",
    ),
    "DeepSeek V3, R1, V3.1": Served(671.0, "deepseek-v3"),
    "DeepSeek V2-Lite": Served(15.7, "deepseek-v2-lite"),
    "DeepSeek V3.2": Served(
        671.9,
        sizes("deepseek_v32", 7168, 61, 128, 128, 18432, 129280, q_lora_rank=1536, first_k_dense_replace=3, **_LATENT)
        | {"n_routed_experts": 256, "n_shared_experts": 1, "index_n_heads": 64, "index_head_dim": 128}
        | {"num_experts_per_tok": 8, "moe_intermediate_size": 2048, "index_topk": 2048},
    ),
    "Kimi K2": Served(
        1026.0,
        sizes("kimi_k2", 7168, 61, 64, 64, 18432, 163840, q_lora_rank=1536, first_k_dense_replace=1, **_LATENT)
        | {"n_routed_experts": 384, "n_shared_experts": 1}
        | {"num_experts_per_tok": 8, "moe_intermediate_size": 2048},
    ),
    "Kimi-Linear 48B-A3B": Served(
        49.1,
        sizes("kimi_linear", 2304, 27, 32, 32, 9216, 163840, **_LATENT)
        | {"linear_attn_config": {"full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32}}
        | experts(256, 8, 1024, num_shared_experts=1),
    ),
    "GLM-4.5, 4.6, 4.7": Served(
        352.8,
        _glm(5120, 92, inner=12288, use_qk_norm=True, first_k_dense_replace=3, n_shared_experts=1)
        | experts(160, 8, 1536),
    ),
    "GLM-4.5-Air": Served(
        106.9, _glm(4096, 46, inner=10944, first_k_dense_replace=1, n_shared_experts=1) | experts(128, 8, 1408)
    ),
    "GLM-4.7-Flash": Served(
        29.9,
        sizes("glm4_moe_lite", 2048, 47, 20, 20, 10240, 154880, q_lora_rank=768, n_shared_experts=1)
        | (_LATENT | {"qk_nope_head_dim": 192, "v_head_dim": 256})
        | {"n_routed_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 1536},
    ),
    "GLM-5": Served(
        744.0,
        sizes("glm_moe_dsa", 6144, 78, 64, 64, 12288, 154880, q_lora_rank=2048, first_k_dense_replace=3)
        | (_LATENT | {"qk_nope_head_dim": 192, "v_head_dim": 256})
        | {"n_routed_experts": 256, "n_shared_experts": 1, "index_n_heads": 32, "index_head_dim": 128}
        | {"num_experts_per_tok": 8, "moe_intermediate_size": 2048, "index_topk": 2048},
    ),
    "MiniMax-M2, M2.1": Served(
        228.7,
        sizes("minimax_m2", 3072, 62, 48, 8, 1536, 200064, head_dim=128, rotary_dim=64)
        | {"num_local_experts": 256, "num_experts_per_tok": 8},
    ),
    "MiMo-V2-Flash": Served(
        308.8,
        sizes("mimo_v2_flash", 4096, 48, 64, 4, 16384, 152576, sliding_window=128)
        | {"n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048},
    ),
    "Gemma 2 9B": Served(9.24, _gemma("gemma2", 3584, 42, 16, 8, 14336, vocab=256000, sliding_window=4096)),
    "Gemma 2 27B": Served(
        27.2, _gemma("gemma2", 4608, 46, 32, 16, 36864, vocab=256000, head_dim=128, sliding_window=4096)
    ),
    "Gemma 3 4B": Served(3.88, _gemma("gemma3_text", 2560, 34, 8, 4, 10240, sliding_window=1024), "text part"),
    "Gemma 3 12B": Served(11.8, "gemma-3-12b", "text part"),
    "Gemma 3 27B": Served(27.0, "gemma-3-27b", "text part"),
    "Gemma 4 31B": Served(
        30.7,
        _gemma4(5376, 60, 32, 16, 21504, num_global_key_value_heads=4, attention_k_eq_v=True, sliding_window=1024),
        "text part",
    ),
    "Gemma 4 26B-A4B": Served(
        25.2,
        _gemma4(2816, 30, 16, 8, 2112, num_global_key_value_heads=2, attention_k_eq_v=True, sliding_window=1024)
        | {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704},
        "text part",
    ),
    "Phi-3.5 mini": Served(3.82, sizes("phi3", 3072, 32, 32, 32, 8192, 32064)),
    "Phi-4": Served(14.7, sizes("phi3", 5120, 40, 40, 10, 17920, 100352)),
    "Phi-4-mini": Served(3.84, sizes("phi3", 3072, 32, 24, 8, 8192, 200064, **TIED)),
    "Mistral 7B v0.3": Served(7.25, sizes("mistral", 4096, 32, 32, 8, 14336, 32768)),
    "Mistral Small 3.2 24B": Served(23.6, sizes("mistral", 5120, 40, 32, 8, 32768, 131072, head_dim=128), "text part"),
    "Ministral 3 8B": Served(8.49, sizes("ministral3", 4096, 34, 32, 8, 14336, 131072, head_dim=128), "text part"),
    "Ministral 3 14B": Served(13.5, sizes("ministral3", 5120, 40, 32, 8, 16384, 131072, head_dim=128), "text part"),
    "Mistral Large 3": Refused("MistralLarge3ForCausalLM", "files in Mistral's own format (`params.json`)"),
    "Mixtral 8x7B": Served(
        46.7, sizes("mixtral", 4096, 32, 32, 8, 14336, 32000, num_local_experts=8, num_experts_per_tok=2)
    ),
    "Nemotron-H 8B": Served(
        8.1, _nemotron(4096, 52, 32, 8, 21504) | {"hybrid_override_pattern": _H_8B, "mamba_num_heads": 128}
    ),
    "Nemotron 3 Nano 30B-A3B": Served(
        31.6,
        _nemotron(2688, 52, 32, 2, 1856)
        | {"hybrid_override_pattern": _NANO, "mamba_num_heads": 64, "n_routed_experts": 128}
        | {"moe_shared_expert_intermediate_size": 3712, "num_experts_per_tok": 6, "moe_intermediate_size": 1856},
    ),
    "Nemotron 3 Super 120B-A12B": Served(
        120.7,
        _nemotron(4096, 88, 32, 2, 2688)
        | {"hybrid_override_pattern": _SUPER, "n_routed_experts": 512, "moe_latent_size": 1024}
        | {"moe_shared_expert_intermediate_size": 5376, "num_experts_per_tok": 22, "moe_intermediate_size": 2688},
    ),
    "Granite 4.0 H-Small 32B-A9B": Served(
        32.2,
        sizes("granitemoehybrid", 4096, 40, 32, 8, 768, 100352, shared_intermediate_size=1536, **_GRANITE)
        | {"mamba_n_heads": 128, "num_local_experts": 72, "num_experts_per_tok": 10},
    ),
    "Granite 4.0 H-Tiny 7B-A1B": Served(
        6.94,
        sizes("granitemoehybrid", 1536, 40, 12, 4, 512, 100352, shared_intermediate_size=1024, **_GRANITE)
        | {"mamba_n_heads": 48, "num_local_experts": 64, "num_experts_per_tok": 6},
    ),
    "Granite 4.0 H-Micro 3B": Served(
        3.19,
        sizes("granitemoehybrid", 2048, 40, 32, 8, 8192, 100352, shared_intermediate_size=8192, **_GRANITE)
        | {"mamba_n_heads": 64, "num_local_experts": 0},
    ),
    "Bamba 9B": Served(
        9.78,
        sizes("bamba", 4096, 32, 32, 8, 14336, 128256, mamba_n_heads=128, mamba_d_state=128)
        | {"attn_layer_indices": [9, 18, 27]},
    ),
    "Jamba": Refused("JambaForCausalLM", "Mamba-1 layers"),
    "Falcon-H1": Refused("FalconH1ForCausalLM", "attention and Mamba-2 side by side in one layer"),
    "OLMo 3 7B": Served(7.3, sizes("olmo3", 4096, 32, 32, 32, 11008, 100278, sliding_window=4096)),
    "OLMo 3 32B": Served(32.2, sizes("olmo3", 5120, 64, 40, 8, 27648, 100278, sliding_window=4096)),
    "SmolLM3 3B": Served(3.08, sizes("smollm3", 2048, 36, 16, 4, 11008, 128256, **TIED)),
    "Seed-OSS 36B": Served(36.2, sizes("seed_oss", 5120, 64, 80, 8, 27648, 155136, head_dim=128)),
    "ERNIE 4.5 21B-A3B": Served(
        21.8,
        sizes("ernie4_5_moe", 2560, 28, 20, 4, 12288, 103424, head_dim=128, moe_num_experts=64, moe_k=6, **TIED)
        | {"moe_num_shared_experts": 2, "moe_intermediate_size": 1536, "moe_layer_start_index": 1},
    ),
    "Hunyuan-A13B": Served(
        80.4,
        sizes("hunyuan_v1_moe", 4096, 32, 32, 8, 3072, 128167, head_dim=128, num_experts=64, moe_topk=8, **TIED),
    ),
    "EXAONE 4.0 32B": Served(32.0, sizes("exaone4", 5120, 64, 40, 8, 27392, 102400, sliding_window=4096)),
    "Command R7B": Served(8.03, sizes("cohere2", 4096, 32, 32, 8, 14336, 256000, sliding_window=4096, **TIED)),
    "Command A 111B": Served(111.1, sizes("cohere2", 12288, 64, 96, 8, 36864, 256000, sliding_window=4096, **TIED)),
    "LFM2 1.2B": Served(
        1.17,
        sizes("lfm2", 2048, 16, 32, 8, 12288, 65536, block_ff_dim=12288, full_attn_idxs=[2, 5, 8, 10, 12, 14]),
    ),
    "LFM2 8B-A1B": Served(
        8.34, sizes("lfm2_moe", 2048, 24, 32, 8, 7168, 65536, layer_types=_LFM2) | experts(32, 4, 1792)
    ),
}
"""Published models by the names that people use."""


def has_gguf(architecture: str) -> bool:
    """Return True if GGUF files of the architecture are read."""
    tested = {parse_spec(FAMILIES[family]).architecture for family in CASES}
    # Files of Mistral's models say that they are Llama's.
    return architecture in tested | {"MistralForCausalLM"}


def gib(spec: ModelSpec, quantization: str | None) -> str:
    """Return the weights of the whole model on a GPU in GiB, with three digits."""
    held = weight_bytes(quantized_at_load(spec, quantization), torch.bfloat16) / 2**30
    return f"{held:,.{max(0, 3 - len(str(int(held))))}f}" if held < 1000 else f"{held:,.0f}"


def table_row(name: str, model: Served | Refused) -> str:
    """Return the line of docs/models.md for a model."""
    if isinstance(model, Refused):
        return f"| {name} | `{model.architecture}` | refused: {model.missing} | | | |"
    spec = model.spec
    files = "safetensors, GGUF" if has_gguf(spec.architecture) else "safetensors"
    sizes_of = " | ".join(gib(spec, codes) for codes in (None, "int8", "int4"))
    return f"| {name} | `{spec.architecture}` | {'; '.join(filter(None, (files, model.note)))} | {sizes_of} |"
