"""The tensors of GGUF files as llama.cpp's converter writes them."""

from typing import Any

import gguf
import numpy as np

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
NORMS_PLUS_ONE = {"gemma", "gemma2", "gemma3", "nemotron", "qwen3next", "qwen35", "qwen35moe"}
DELTA = {"qwen3next", "qwen35", "qwen35moe"}
SAME_NAMES = {"deepseek32": "glm-dsa", "cohere2moe": "deepseek2"}
"""Architectures that the gguf package does not know, and known ones whose tensors have the same names."""


def converted(weights: Weights, config: dict[str, Any], kind: str, split_latent: bool) -> Weights:
    """Return the tensors of a GGUF file, with the names of the gguf package."""
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(numbers[SAME_NAMES.get(kind, kind)], config["num_hidden_layers"])
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
    if kind == "gemma4":
        # A quarter of the pairs is rotated.
        pairs = config["global_head_dim"] // 2
        result["rope_freqs.weight"] = np.where(np.arange(pairs) < pairs // 4, 1.0, 1e30).astype(np.float32)
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
    if kind in {"qwen35", "qwen35moe"} and ".linear_attn." in name:
        weight = _reordered(name, weight, config)
    if name.endswith(".A_log"):
        return -np.exp(weight) if kind in DELTA | {"kimi-linear"} else -np.exp(weight).reshape(-1, 1)
    if kind == "kimi-linear" and "_conv1d." in name:
        return weight.reshape(1, weight.shape[0], 1, -1)
    if name.endswith(("conv1d.weight", "conv.conv.weight")):
        return weight.squeeze(1)
    if name.endswith(".D"):
        return weight[:, None]
    if name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
        return weight.reshape(config.get("mamba_n_groups") or config.get("n_groups") or 1, -1)
    return weight


def _reordered(name: str, weight: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """Return a weight of Gated DeltaNet with the first value head of every key head first, then the second of each."""
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]

    def tiled(part: np.ndarray) -> np.ndarray:
        by_head = part.reshape(keys, heads // keys, -1, *part.shape[1:])
        return by_head.swapaxes(0, 1).reshape(part.shape)

    if ".norm." in name:
        return weight
    if ".out_proj." in name:
        return tiled(weight.T).T
    before = 2 * keys * config["linear_key_head_dim"] if ".in_proj_qkv." in name or ".conv1d." in name else 0
    return np.concatenate((weight[:before], tiled(weight[before:])))


def _parts(name: str, weight: np.ndarray, config: dict[str, Any], *, split_latent: bool) -> Weights:
    """Return the tensors that the converter makes of one, by names that the gguf package knows."""
    stem, _, last = name.rpartition(".")
    if "in_proj_qkvz" in name or "shared_mlp." in name or "input_linear" in name:
        return _hybrid_parts(name, weight, config)
    if name.endswith("kv_b_proj.weight") and split_latent:
        stem, nope = stem.removesuffix("kv_b_proj"), config["qk_nope_head_dim"]
        heads = weight.reshape(config["num_attention_heads"], -1, config["kv_lora_rank"])
        return {f"{stem}k_b_proj.weight": heads[:, :nope].swapaxes(1, 2), f"{stem}v_b_proj.weight": heads[:, nope:]}
    if last in {"gate_up_proj", "gate_up_proj_bias", "down_proj"}:
        return _expert_parts(name, weight, config["model_type"])
    renamed = {"down_proj_bias": "down_proj.bias", "sinks": "sinks.weight", "dt_bias": "dt_proj.bias"}
    renamed |= {"attention_sink_bias": "attention_sink_bias.weight", "layer_scalar": "layer_scalar.weight"}
    renamed["expert_bias"] = "expert_bias.bias"
    return {f"{stem}.{renamed.get(last, last)}".replace("correction_bias", "correction.bias"): weight}


def _expert_parts(name: str, weight: np.ndarray, model_type: str) -> Weights:
    """Return the tensors of experts that a checkpoint stacks in one."""
    stem, _, last = name.rpartition(".")
    transposed = model_type in {"llama4_text", "gpt_oss"}
    if last == "down_proj" or model_type in {"mistral4", "gemma4_text"}:
        return {f"{name}.weight": weight.swapaxes(1, 2) if transposed else weight}
    kind = "bias" if last.endswith("bias") else "weight"
    weight = weight.swapaxes(1, 2) if transposed and kind == "weight" else weight
    gate, up = (weight[:, 0::2], weight[:, 1::2]) if model_type == "gpt_oss" else np.split(weight, 2, axis=1)
    return {f"{stem}.gate_proj.{kind}": gate, f"{stem}.up_proj.{kind}": up}


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
    for last, tensor in (("router.scale", "ffn_gate_inp.scale"), ("router.per_expert_scale", "ffn_down_exps.scale")):
        if name.endswith(last):
            return f"blk.{name.split('.')[2]}.{tensor}"
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return str(found)


def _permute(weight: np.ndarray, heads: int) -> np.ndarray:
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, 2, half, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
