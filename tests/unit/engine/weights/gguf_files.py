"""Writes GGUF files of tiny models as llama.cpp's converter does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.factories import FAMILIES, random_weights
from tests.unit.engine.weights.gguf_keys import metadata
from tests.unit.engine.weights.gguf_tensors import converted

OLD_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
MISTRAL4_ROPE = OLD_YARN | {
    "original_max_position_embeddings": 16,
    "rope_theta": 10000.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("llama", {"rope_scaling": None}),
    "mqa": ("llama", {}),
    "biased": ("llama", {}),
    "mixtral": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "yarn": ("qwen3", {"rope_parameters": OLD_YARN, "rope_theta": 10000.0}),
    "qwen2_moe": ("qwen2moe", {"mlp_only_layers": []}),
    "qwen3_moe": ("qwen3moe", {}),
    "ministral3": ("mistral3", {}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 32}),
    "gemma3": ("gemma3", {}),
    "phi3": ("phi3", {}),
    "phi3_longrope": ("phi3", {}),
    "glm4": ("glm4", {}),
    "glm4_moe": ("glm4moe", {}),
    "deepseek_v2_lite": ("deepseek2", {}),
    "deepseek_v2": ("deepseek2", {}),
    "deepseek_v3": ("deepseek2", {}),
    "deepseek_v3_full_queries": ("deepseek2", {}),
    "glm4_moe_lite": ("deepseek2", {"num_nextn_predict_layers": None}),
    "gpt_oss": ("gpt-oss", {}),
    "granite": ("granite", {}),
    "granite_moe": ("granitemoe", {}),
    "cohere2": ("cohere2", {"sliding_window_pattern": 4}),
    "nemotron": ("nemotron", {}),
    "arcee": ("arcee", {}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo2", {}),
    "olmoe": ("olmoe", {}),
    "ernie4_5": ("ernie4_5", {}),
    "ernie4_5_moe": ("ernie4_5-moe", {}),
    "hunyuan_v1_dense": ("hunyuan-dense", {}),
    "hunyuan_v1_moe": ("hunyuan-moe", {"moe_topk": 2}),
    "seed_oss": ("seed_oss", {}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 4}),
    "exaone4": ("exaone4", {"rope_scaling": None}),
    "exaone4_no_windows": ("exaone4", {"sliding_window": None}),
    "exaone_moe": ("exaone-moe", {}),
    "dots1": ("dots1", {"max_window_layers": 62, "sliding_window": None}),
    "minimax_m2": ("minimax-m2", {}),
    "lfm2": ("lfm2", {"conv_bias": False}),
    "lfm2_moe": ("lfm2moe", {"routed_scaling_factor": 1.0, "tie_word_embeddings": True}),
    "granite_moe_shared": ("granitemoe", {"attention_multiplier": 0.1}),
    "granitemoehybrid": (
        "granitehybrid",
        {"position_embedding_type": "nope", "intermediate_size": 48, "num_experts_per_tok": 0},
    ),
    "granitemoehybrid_experts": ("granitehybrid", {}),
    "nemotron_h": ("nemotron_h", {"num_hidden_layers": 5}),
    "nemotron_h_experts": ("nemotron_h_moe", {"num_hidden_layers": 5}),
    "nemotron_h_latent": ("nemotron_h_moe", {"num_hidden_layers": 5}),
    "qwen3_next": ("qwen3next", {"mlp_only_layers": [], "layer_types": None}),
    "qwen3_5": ("qwen35", {"layer_types": None, "linear_value_head_dim": 32}),
    "qwen3_5_moe": ("qwen35moe", {"layer_types": None}),
    "kimi_linear": ("kimi-linear", {"num_expert_group": 1, "topk_group": 1}),
    "bamba": ("granitehybrid", {}),
    "gemma4": ("gemma4", {}),
    "gemma4_experts": ("gemma4", {"moe_intermediate_size": 64}),
    "gemma4_e2b": ("gemma4", {"hidden_size_per_layer_input": 16}),
    "mimo_v2_flash": ("mimo2", {"attention_value_scale": 0.5}),
    "cohere2_moe": ("cohere2moe", {}),
    "deepseek_v32": ("deepseek32", {}),
    "glm_moe_dsa": ("glm-dsa", {}),
    "mistral4": ("mistral4", {"rope_parameters": MISTRAL4_ROPE}),
    "llama4": ("llama4", {"attention_chunk_size": 8192, "floor_scale": 8192, "rope_scaling": None}),
}
"""The architecture of each family's files, and what they cannot express or what the family's files have fixed."""


def write_family(
    path: Path,
    family: str,
    *,
    split_latent: bool = True,
    blocks: gguf.GGMLQuantizationType | None = None,
    tokens: list[str] | None = None,
    architecture: str | None = None,
) -> Path:
    """Write a GGUF file of a tiny model, with matrices in the type `blocks`; None = float32."""
    kind, changes = CASES[family]
    kind = architecture or kind
    config = {key: value for key, value in (FAMILIES[family] | changes).items() if value is not None}
    writer = gguf.GGUFWriter(path, kind)
    for key, value in metadata(config, kind, split_latent=split_latent).items():
        name = f"{kind}.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        else:
            add: dict[type, Callable[[str, Any], None]] = {
                bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
            }  # fmt: skip
            add[type(value)](name, value)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
    if tokens is not None:
        writer.add_token_list(tokens)
    for name, weight in converted(random_weights(FAMILIES[family] | changes), config, kind, split_latent).items():
        packed = blocks if weight.ndim > 1 and "norm" not in name and weight.shape[-1] % 32 == 0 else None
        packed = None if "ffn_gate_inp" in name else packed
        writer.add_tensor(
            name,
            np.ascontiguousarray(weight) if packed is None else gguf.quants.quantize(weight, packed),
            raw_dtype=packed,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def split_gguf(path: Path, most: int, *, metadata_first: bool = False) -> Path:
    """Divide a GGUF file among files of at most `most` tensors beside it, as gguf-split does; return the first one.

    With `metadata_first`, the first one has no tensors, as with gguf-split's --no-tensor-first-split.
    """
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(path, "", split_max_tensors=most, small_first_shard=metadata_first)
    for field in reader.fields.values():
        if not field.name.startswith("GGUF."):
            writer.add_key_value(field.name, field.contents(), field.types[0], field.types[-1])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return next(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))
