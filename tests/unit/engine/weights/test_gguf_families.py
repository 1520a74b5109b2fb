"""A tiny model of each family, written as llama.cpp's converter does, has the logits of its safetensors."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.model_runner import ModelRunner
from tandem.engine.models.allocation import quantized_weights
from tandem.engine.steps.batch import StepBatch
from tandem.engine.weights import gguf as conversion
from tandem.engine.weights.checkpoint import check_model
from tandem.engine.weights.gguf import prepare_model
from tandem.engine.weights.gguf_architectures import ARCHITECTURES
from tandem.protocol.errors import ModelError
from tests.factories import FAMILIES, random_weights, row, tiny_engine_config, write_tiny_model

Weights = dict[str, np.ndarray]
PERMUTED = {
    "llama",
    "mistral3",
    "granite",
    "granitemoe",
    "arcee",
    "smollm3",
    "granitehybrid",
    "nemotron_h",
    "nemotron_h_moe",
}
NORMS_PLUS_ONE = {"gemma", "gemma2", "gemma3", "nemotron", "qwen3next"}
STATES = ["lfm2", "lfm2_moe", "nemotron_h", "nemotron_h_experts", "granitemoehybrid", "qwen3_next"]
OLD_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

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


def metadata(config: dict[str, Any], kind: str, *, split_latent: bool) -> dict[str, Any]:
    """Return the metadata that the converter writes for a config.json, by key without the architecture."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    theta = config.get("rope_theta") or scaling.get("rope_theta") or 10000.0
    if scaling.get("type") == "dynamic":
        theta, scaling = theta * scaling["alpha"] ** (head_dim / (head_dim - 2)), {}
    rotated = config.get("rotary_dim") or int(head_dim * config.get("partial_rotary_factor", 1))
    norm = "attention.layer_norm_epsilon" if kind in {"cohere2", "nemotron"} else "attention.layer_norm_rms_epsilon"
    keys = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "block_count": config["num_hidden_layers"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "rope.freq_base": float(theta),
        "rope.dimension_count": rotated,
        norm: float(config.get("layer_norm_eps") or config.get("norm_eps") or config["rms_norm_eps"]),
    }
    if "head_dim" in config:
        keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    keys |= _copied_fields(config)
    if "sliding_window" in config and kind in {"exaone4", "exaone-moe", "gemma3", "olmo2"}:
        every = config.get("sliding_window_pattern", 4)
        keys["attention.sliding_window_pattern"] = [
            bool((number + 1) % every) for number in range(config["num_hidden_layers"])
        ]
    if (rope := scaling.get("rope_type") or scaling.get("type")) in {"linear", "yarn"}:
        keys |= {"rope.scaling.type": rope, "rope.scaling.factor": float(scaling["factor"])}
    if original := scaling.get("original_max_position_embeddings") or config.get("original_max_position_embeddings"):
        keys["rope.scaling.original_context_length"] = original
    if "llama_4_scaling_beta" in scaling:
        keys |= {"attention.temperature_scale": scaling["llama_4_scaling_beta"]}
        keys |= {"rope.scaling.yarn_log_multiplier": scaling["mscale_all_dim"]}
    keys |= _state_keys(config, kind)
    if "kv_lora_rank" in config:
        keys |= _latent_keys(config, scaling, split_latent=split_latent)
    return keys


def _copied_fields(config: dict[str, Any]) -> dict[str, Any]:
    names = {
        "interleave_moe_layer_step": ("interleave_moe_layer_step",),
        "attention.sliding_window": ("sliding_window",),
        "rope.freq_base_swa": ("rope_local_base_freq",),
        "attn_logit_softcapping": ("attn_logit_softcapping",),
        "final_logit_softcapping": ("final_logit_softcapping",),
        "attention.scale": ("attention_multiplier",),
        "embedding_scale": ("embedding_multiplier",),
        "residual_scale": ("residual_multiplier",),
        "logit_scale": ("logits_scaling", "logit_scale"),
        "expert_count": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
        "expert_used_count": ("num_experts_per_tok", "moe_k", "moe_topk"),
        "expert_feed_forward_length": ("moe_intermediate_size",),
        "expert_shared_feed_forward_length": (
            "shared_expert_intermediate_size",
            "shared_intermediate_size",
            "moe_shared_expert_intermediate_size",
        ),
        "moe_latent_size": ("moe_latent_size",),
        "expert_shared_count": ("n_shared_experts", "moe_num_shared_experts", "num_shared_experts"),
        "expert_weights_scale": ("routed_scaling_factor",),
        "expert_weights_norm": ("norm_topk_prob",),
        "expert_group_count": ("n_group",),
        "expert_group_used_count": ("topk_group",),
        "leading_dense_block_count": ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers"),
    }
    copied = {key: next((config[field] for field in fields if field in config), None) for key, fields in names.items()}
    if config["model_type"] == "exaone_moe":
        copied["leading_dense_block_count"] = 1
    if config["model_type"] in {"qwen2_moe", "qwen3_moe", "olmoe"}:
        # The architecture implies it.
        copied["expert_weights_norm"] = None
    return {key: value for key, value in copied.items() if value is not None}


def _state_keys(config: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the metadata of state layers, and the counts that differ between layers."""
    hidden, kv_heads = config["hidden_size"], config["num_key_value_heads"]
    if kind == "llama4":
        return {
            "feed_forward_length": config["intermediate_size_mlp"],
            "expert_feed_forward_length": config["intermediate_size"],
        }
    if kind == "qwen3next":
        heads, groups = config["linear_num_value_heads"], config["linear_num_key_heads"]
        inner, state = heads * config["linear_value_head_dim"], config["linear_key_head_dim"]
        return _ssm_keys(heads, inner, state, groups) | {
            "full_attention_interval": 4,
            "rope.dimension_count": config["head_dim"] // 4,
        }
    if kind in {"lfm2", "lfm2moe"}:
        attention = [layer == "full_attention" for layer in config["layer_types"]]
        width = config["intermediate_size"]
        return {
            "attention.head_count_kv": [kv_heads * is_attention for is_attention in attention],
            "shortconv.l_cache": 3,
            "feed_forward_length": -(-(2 * width // 3) // 32) * 32 if kind == "lfm2" else width,
        }
    if kind == "granitehybrid":
        attention = [layer == "full_attention" for layer in config["layer_types"]]
        inner = config["mamba_expand"] * hidden
        return _ssm_keys(config["mamba_n_heads"], inner, config["mamba_d_state"], config.get("mamba_n_groups", 1)) | {
            "attention.head_count_kv": [kv_heads * is_attention for is_attention in attention],
            "rope.scaling.finetuned": False,
            "context_length": 2**20,
        }
    if kind in {"nemotron_h", "nemotron_h_moe"}:
        letters = config.get("hybrid_override_pattern") or "M-M*-"
        width = config["moe_intermediate_size" if "E" in letters else "intermediate_size"]
        heads = config["mamba_num_heads"]
        inner = heads * config["mamba_head_dim"]
        return _ssm_keys(heads, inner, config["ssm_state_size"], config["n_groups"]) | {
            "attention.head_count_kv": [kv_heads * (letter == "*") for letter in letters],
            "feed_forward_length": [width * (letter in "-E") for letter in letters],
            # The converter derives it from the hidden size where config.json has no head_dim.
            "rope.dimension_count": hidden // config["num_attention_heads"],
        }
    return {}


def _ssm_keys(heads: int, inner: int, state: int, groups: int) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": 4,
        "ssm.state_size": state,
        "ssm.group_count": groups,
        "ssm.inner_size": inner,
        "ssm.time_step_rank": heads,
    }


def _latent_keys(config: dict[str, Any], scaling: dict[str, Any], *, split_latent: bool) -> dict[str, Any]:
    rotated, rank = config["qk_rope_head_dim"], config["kv_lora_rank"]
    length, values = config["qk_nope_head_dim"] + rotated, config["v_head_dim"]
    keys = {
        "attention.kv_lora_rank": rank,
        "rope.dimension_count": rotated,
        "expert_gating_func": 1 if config["model_type"] == "deepseek_v2" else 2,
    }
    if split_latent:
        keys |= {"attention.head_count_kv": 1, "attention.key_length": rank + rotated, "attention.value_length": rank}
        keys |= {"attention.key_length_mla": length, "attention.value_length_mla": values}
    else:
        keys |= {"attention.key_length": length, "attention.value_length": values}
    if "q_lora_rank" in config:
        keys["attention.q_lora_rank"] = config["q_lora_rank"]
    if "mscale_all_dim" in scaling:
        keys["rope.scaling.yarn_log_multiplier"] = 0.1 * scaling["mscale_all_dim"]
    return keys


def converted(weights: Weights, config: dict[str, Any], kind: str, split_latent: bool) -> Weights:
    """Return the tensors of a GGUF file, with the names of the gguf package."""
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(numbers[kind], config["num_hidden_layers"])
    result: Weights = {}
    experts: dict[str, list[np.ndarray]] = {}
    for name, weight in weights.items():
        before, _, after = name.partition(".experts.")
        if after[:1].isdigit():
            stacked = f"{before}.experts.{after.partition('.')[2]}"
            stacked = stacked.replace("backbone.layers", "model.layers").replace(".mixer.", ".mlp.")
            stacked = stacked.removeprefix("model.") if ".feed_forward." in stacked else stacked
            experts.setdefault(stacked, []).append(weight)
            continue
        for part, values in _parts(name, weight, config, split_latent=split_latent).items():
            result[_named(names, part)] = _changed(part, values, config, kind)
    result |= {_named(names, name): np.stack(parts) for name, parts in experts.items()}
    for length in ("short", "long"):
        if factors := (config.get("rope_scaling") or {}).get(f"{length}_factor"):
            result[f"rope_factors_{length}.weight"] = np.array(factors, np.float32)
    return result


def _changed(name: str, weight: np.ndarray, config: dict[str, Any], kind: str) -> np.ndarray:
    """Return the values that the converter writes for a tensor of the checkpoint."""
    if kind in PERMUTED and ".q_proj." in name:
        return _permute(weight, config["num_attention_heads"])
    if kind in PERMUTED and ".k_proj." in name:
        return _permute(weight, config["num_key_value_heads"])
    if kind in NORMS_PLUS_ONE and name.endswith("norm.weight") and "linear_attn" not in name:
        return weight + 1
    weight = _changed_state(name, weight, config, kind)
    return weight.reshape(-1) if name.endswith(("correction.bias", "shared_expert_gate.weight")) else weight


def _changed_state(name: str, weight: np.ndarray, config: dict[str, Any], kind: str) -> np.ndarray:
    """Return the values that the converter writes for a tensor of a state layer; those of others are unchanged."""
    if name.endswith(".A_log"):
        return (-np.exp(weight)).reshape((-1,) if kind == "qwen3next" else (-1, 1))
    if name.endswith(("conv1d.weight", "conv.conv.weight")):
        return weight.squeeze(1)
    if name.endswith(".D"):
        return weight[:, None]
    if name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
        return weight.reshape(config.get("mamba_n_groups") or config.get("n_groups") or 1, -1)
    return weight


def _parts(name: str, weight: np.ndarray, config: dict[str, Any], *, split_latent: bool) -> Weights:
    """Return the tensors that the converter makes of one, by names that the gguf package knows."""
    stem, _, last = name.rpartition(".")
    if "in_proj_qkvz" in name or "shared_mlp." in name or "input_linear" in name:
        return _hybrid_parts(name, weight, config)
    if name.endswith("kv_b_proj.weight") and split_latent:
        stem, nope = stem.removesuffix("kv_b_proj"), config["qk_nope_head_dim"]
        heads = weight.reshape(config["num_attention_heads"], -1, config["kv_lora_rank"])
        return {f"{stem}k_b_proj.weight": heads[:, :nope].swapaxes(1, 2), f"{stem}v_b_proj.weight": heads[:, nope:]}
    if last == "gate_up_proj":
        halves = np.split(weight, 2, axis=2)
        gate, up = halves if config["model_type"] == "llama4_text" else (weight[..., 0::2], weight[..., 1::2])
        gate, up = gate.swapaxes(1, 2), up.swapaxes(1, 2)
        return {f"{stem}.gate_proj.weight": gate, f"{stem}.up_proj.weight": up}
    if last == "gate_up_proj_bias":
        return {f"{stem}.gate_proj.bias": weight[..., 0::2], f"{stem}.up_proj.bias": weight[..., 1::2]}
    if last == "down_proj":
        return {f"{name}.weight": weight.swapaxes(1, 2)}
    renamed = {"down_proj_bias": "down_proj.bias", "sinks": "sinks.weight", "dt_bias": "dt_proj.bias"}
    renamed["expert_bias"] = "expert_bias.bias"
    return {f"{stem}.{renamed.get(last, last)}".replace("correction_bias", "correction.bias"): weight}


def _hybrid_parts(name: str, weight: np.ndarray, config: dict[str, Any]) -> Weights:
    """Return the tensors of Gated DeltaNet's projections, or of Granite's experts."""
    stem = name.removesuffix(".weight")
    if name.endswith("block_sparse_moe.input_linear.weight"):
        gate, up = np.split(weight, 2, axis=1)
        return {
            f"{stem.replace('input_linear', 'experts.w1')}.weight": gate,
            f"{stem.replace('input_linear', 'experts.w3')}.weight": up,
        }
    if name.endswith("in_proj_qkvz.weight"):
        return _projections(stem, weight, config)
    if name.endswith("shared_mlp.input_linear.weight"):
        return _shared_projections(name, weight, config)
    if name.endswith("shared_mlp.output_linear.weight") and not config.get("num_local_experts"):
        return {f"{stem.replace('shared_mlp.output_linear', 'mlp.down_proj')}.weight": weight}
    return {name: weight}


def _projections(stem: str, weight: np.ndarray, config: dict[str, Any]) -> Weights:
    """Return q, k and v, and the gate z, of Gated DeltaNet, from the rows of each key head in turn."""
    keys, heads = config["linear_key_head_dim"], config["linear_num_key_heads"]
    values = config["linear_value_head_dim"] * config["linear_num_value_heads"] // heads
    by_head = weight.reshape(heads, -1, weight.shape[-1])
    parts = np.split(by_head, np.cumsum([keys, keys, values]), axis=1)
    q, k, v, z = (part.reshape(-1, weight.shape[-1]) for part in parts)
    linear = stem.removesuffix("in_proj_qkvz")
    return {f"{linear}in_proj_qkv.weight": np.concatenate([q, k, v]), f"{linear}in_proj_z.weight": z}


def _shared_projections(name: str, weight: np.ndarray, config: dict[str, Any]) -> Weights:
    layer = name.removesuffix("shared_mlp.input_linear.weight")
    module = "mlp.shared_experts" if config.get("num_local_experts") else "mlp"
    gate, up = np.split(weight, 2)
    return {f"{layer}{module}.gate_proj.weight": gate, f"{layer}{module}.up_proj.weight": up}


def _named(names: gguf.TensorNameMap, name: str) -> str:
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return str(found)


def _permute(weight: np.ndarray, heads: int) -> np.ndarray:
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, 2, half, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


@pytest.fixture
def _no_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "_write_tokenizer", lambda *_: None)


def logits(folder: Path) -> torch.Tensor:
    # Enough pages for models with several groups of layers, each of which has its own.
    batch = StepBatch([row(list(range(3, 43)), 0, list(range(12)))])
    return ModelRunner.load(tiny_engine_config(folder), kernels=ReferenceKernels()).logits(batch)


@pytest.mark.usefixtures("_no_tokenizer")
@pytest.mark.parametrize("family", CASES)
def test_a_gguf_file_has_the_logits_of_its_safetensors(family: str, tmp_path: Path) -> None:
    folder = prepare_model(write_family(tmp_path / "tiny.gguf", family), tmp_path / "cache")
    twin = write_tiny_model(tmp_path / "twin", family, **CASES[family][1])
    nulls = {field: None for field, value in CASES[family][1].items() if value is None}
    config = json.loads((twin / "config.json").read_text())
    (twin / "config.json").write_text(json.dumps(config | nulls))
    torch.testing.assert_close(logits(folder), logits(twin), atol=2e-5, rtol=2e-5)


@pytest.mark.usefixtures("_no_tokenizer")
@pytest.mark.parametrize(
    ("family", "architecture"), [("qwen2", "qwen2vl"), ("qwen3", "qwen3vl"), ("qwen3_moe", "qwen3vlmoe")]
)
def test_the_text_of_a_multimodal_file_is_its_text_model(family: str, architecture: str, tmp_path: Path) -> None:
    path = write_family(tmp_path / "tiny.gguf", family, architecture=architecture)
    twin = write_tiny_model(tmp_path / "twin", family)
    torch.testing.assert_close(logits(prepare_model(path, tmp_path / "cache")), logits(twin), atol=2e-5, rtol=2e-5)


@pytest.mark.usefixtures("_no_tokenizer")
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_the_latent_projection_may_be_one_tensor(family: str, tmp_path: Path) -> None:
    path = write_family(tmp_path / "tiny.gguf", family, split_latent=False)
    twin = write_tiny_model(tmp_path / "twin", family)
    torch.testing.assert_close(logits(prepare_model(path, tmp_path / "cache")), logits(twin), atol=2e-5, rtol=2e-5)


@pytest.mark.usefixtures("_no_tokenizer")
@pytest.mark.parametrize(
    "family", ["mixtral", "qwen3_moe", "gemma2", "phi3", "glm4", "deepseek_v3", "granite_moe", *STATES]
)
def test_quantized_blocks_have_the_logits_of_their_values(family: str, tmp_path: Path) -> None:
    path = write_family(tmp_path / "tiny.gguf", family, blocks=gguf.GGMLQuantizationType.Q8_0)
    kept, plain = (prepare_model(path, tmp_path / "cache", codes=codes) for codes in (True, False))
    assert check_model(kept).quantization is not None
    torch.testing.assert_close(logits(kept), logits(plain), atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("_no_tokenizer")
def test_blocks_of_stacked_experts_are_kept(tmp_path: Path) -> None:
    path = write_family(tmp_path / "tiny.gguf", "gpt_oss", blocks=gguf.GGMLQuantizationType.MXFP4)
    kept, plain = (prepare_model(path, tmp_path / "cache", codes=codes) for codes in (True, False))
    assert {"layers.0.feed_forward.gate_up", "layers.0.feed_forward.down"} <= set(
        quantized_weights(check_model(kept)).packings
    )
    torch.testing.assert_close(logits(kept), logits(plain), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    "kind",
    ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"],
)
def test_every_block_type_of_public_files_is_dequantized(kind: str, tmp_path: Path) -> None:
    blocks = gguf.GGMLQuantizationType[kind]
    size, type_size = gguf.GGML_QUANT_SIZES[blocks]
    data = np.random.default_rng(0).integers(0, 60, (3, 512 // size * type_size), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("token_embd.weight", data, raw_dtype=blocks)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (tensor,) = gguf.GGUFReader(tmp_path / "m.gguf").tensors
    output = conversion._outputs(
        {"token_embd.weight": tensor}, ARCHITECTURES["llama"], {"num_hidden_layers": 0}, codes=False
    )["model.embed_tokens.weight"]
    assert output.shape == (3, 512)
    assert np.array_equal(output.read(), gguf.dequantize(data, blocks))


@pytest.mark.parametrize("kind", ["command-r", "mamba", "gemma3n", "mistral4"])
def test_an_unsupported_architecture_is_named(kind: str, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", kind)
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        ModelError, match=f"architecture {kind} is not supported, because there is no table of its tensor names"
    ):
        prepare_model(tmp_path / "m.gguf", tmp_path / "cache")


@pytest.mark.parametrize("agrees", [True, False])
def test_a_tokenizer_that_transformers_cannot_read_is_taken_from_the_folder(agrees: bool, tmp_path: Path) -> None:
    """Transformers has no tokenizer for files of GLM-4; the one beside the file must have the file's tokens."""
    tokens = ["<unk>", "a", "b"]
    path = write_family(tmp_path / "tiny.gguf", "glm4", tokens=tokens)
    with pytest.raises(ModelError, match=r"cannot be converted .* put tokenizer\.json"):
        prepare_model(path, tmp_path / "cache")
    words = {token: number for number, token in enumerate(tokens if agrees else ["<unk>", "b", "a"])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>").save_pretrained(tmp_path)
    if agrees:
        assert AutoTokenizer.from_pretrained(prepare_model(path, tmp_path / "cache"))("b")["input_ids"] == [2]
    else:
        with pytest.raises(ModelError, match="has other tokens than the file"):
            prepare_model(path, tmp_path / "cache")


def test_a_bamba_file_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "granitehybrid")
    writer.add_bool("granitehybrid.rope.scaling.finetuned", True)
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"Bamba is not supported as a GGUF file.* safetensors"):
        prepare_model(tmp_path / "m.gguf", tmp_path / "cache")


@pytest.mark.usefixtures("_no_tokenizer")
@pytest.mark.parametrize(
    ("family", "key"), [("lfm2", "attention.head_count_kv"), ("nemotron_h", "feed_forward_length")]
)
def test_a_file_without_counts_of_its_layers_is_refused(
    family: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = metadata
    monkeypatch.setitem(
        globals(),
        "metadata",
        lambda config, kind, *, split_latent: counts(config, kind, split_latent=split_latent) | {key: 2},
    )
    with pytest.raises(ModelError, match=rf"{key} must have a value for each layer"):
        prepare_model(write_family(tmp_path / "tiny.gguf", family), tmp_path / "cache")
