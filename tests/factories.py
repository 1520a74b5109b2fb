"""Tiny models on disk, one for each model family, and rows of batches for them."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.config import EngineConfig
from engine.models.families import places_of
from engine.models.load_spec import parse_spec
from engine.models.parameters import allocate_parameters
from engine.steps.batch import Draw, StepRow
from engine.weights.safetensors_file import write_float32
from wire.messages import SamplingParams

_BASE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama2": _BASE | {"num_key_value_heads": 4},
    "llama3": _BASE | {"rope_scaling": _LLAMA3_ROPE, "rope_theta": 500000.0},
    "mqa": _BASE | {"num_key_value_heads": 1, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "biased": _BASE | {"attention_bias": True, "mlp_bias": True, "head_dim": 32},
    "smollm2": _BASE
    | {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 96, "tie_word_embeddings": True},
    "mistral": _BASE | {"model_type": "mistral", "sliding_window": 12},
    "qwen2": _BASE | {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 8},
    "qwen2_windows": _BASE
    | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "qwen3": _BASE | {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
    "yarn": _BASE | {"model_type": "qwen3", "head_dim": 32, "rope_parameters": _YARN_ROPE, "rope_theta": None},
}
"""Configurations as Hugging Face writes them, with the field names of transformers 4 (`yarn`: 5), by family."""


def write_tiny_model(folder: Path, family: str = "llama3", seed: int = 0, **changes: object) -> Path:
    """Writes a loadable folder (config.json, model.safetensors) with random weights; `changes` override the config."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {key: value for key, value in (FAMILIES[family] | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = random_weights(config, seed)
    write_float32(folder / "model.safetensors", {name: each.shape for name, each in tensors.items()}, tensors.values())
    return folder


def random_weights(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Returns float32 weights of a configuration by checkpoint name, scaled so that activations stay near 1."""
    parsed = parse_spec(config, {})
    places = places_of(parsed, allocate_parameters(parsed, torch.float32, torch.device("meta")))
    rng = np.random.default_rng(seed)
    return {name: _random_tensor(rng, name, place.stored_shape) for name, place in places.items()}


def tiny_engine_config(folder: Path, **changes: Any) -> EngineConfig:
    """Returns an engine configuration with one thread, one megabyte of KV, and defaults otherwise."""
    settings: dict[str, Any] = {"model": folder, "threads": 1, "kv_cache_bytes": 1 << 20}
    return EngineConfig(**(settings | changes))


def draw(index: int = 0, **changes: Any) -> Draw:
    """Returns draw number `index`, greedy unless `changes` to its SamplingParams differ."""
    return Draw(SamplingParams(**({"max_tokens": 64} | changes)), index)


def row(token_ids: list[int], start: int, page_ids: list[int], *, drawn: bool = True) -> StepRow:
    """Returns a greedy row, or one without a draw."""
    return StepRow(token_ids, start, page_ids, draw() if drawn else None)


def _random_tensor(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    values = rng.standard_normal(shape, dtype=np.float32)
    if "norm" in name:
        return 1 + values / 10
    scale = 1.0 if len(shape) == 1 or "embed" in name else 1 / math.sqrt(shape[-1])
    return (values * scale).astype(np.float32)
