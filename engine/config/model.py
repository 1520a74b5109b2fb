"""A model's configuration, read from a Hugging Face `config.json`."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wire.errors import ModelError

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding; `kind` decides which of the other fields count. Contexts are in tokens."""

    theta: float = 10000.0
    kind: str = "default"
    """`default`, `linear`, `llama3` or `yarn`."""
    factor: float = 1.0
    original_context: int = 0
    """Context before scaling (llama3, yarn)."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    """Multiplies cos and sin (yarn)."""
    truncate: bool = True
    """True if yarn's correction range is rounded to whole dimensions."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A Llama-family decoder; sizes are counts of elements, contexts of tokens."""

    architecture: str
    """`llama`, `mistral`, `qwen2` or `qwen3`."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    max_context: int
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    """Bias of attention's output product."""
    mlp_bias: bool
    qk_norm: bool
    rope: RopeConfig
    windows: tuple[int | None, ...]
    """For each layer the number of latest positions a token sees, None = all."""
    eos_token_ids: tuple[int, ...]
    dtype: str | None
    """The checkpoint's own dtype, None where it is not stated."""

    @property
    def qkv_size(self) -> int:
        """Rows of the stacked q/k/v weight."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim


SUPPORTED_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
_SUPPORTED_ROPE = ("default", "linear", "llama3", "yarn")


def load_model_config(folder: Path) -> ModelConfig:
    """Reads `config.json` and, if it exists, `generation_config.json`; ModelError names the file and the problem."""
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder; give a folder in Hugging Face layout or a GGUF file.")
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json; a model folder needs config.json, safetensors and a tokenizer.")
    config = _read_json(folder / "config.json")
    generation_file = folder / "generation_config.json"
    generation = _read_json(generation_file) if generation_file.is_file() else {}
    try:
        return parse_model_config(config, generation)
    except ModelError as error:
        raise ModelError(f"{folder / 'config.json'}: {error.message}") from error
    except (KeyError, TypeError, ValueError, ZeroDivisionError, AttributeError) as error:
        raise ModelError(
            f"{folder / 'config.json'}: {_reason(error)}; the file is not a complete model configuration."
        ) from error


def parse_model_config(config: Json, generation: Json) -> ModelConfig:
    """Returns a ModelConfig from the two parsed files, in the spelling of transformers 4 or 5.

    Raises ModelError for what is not supported, KeyError, TypeError or ValueError for a malformed configuration.
    """
    kind = config.get("model_type")
    if kind not in SUPPORTED_ARCHITECTURES:
        named = config.get("architectures") or [kind]
        raise ModelError(
            f"architecture {named[0]} (model_type {kind!r}) is not supported; "
            f"supported model types are {', '.join(SUPPORTED_ARCHITECTURES)}."
        )
    activation = config.get("hidden_act") or "silu"
    if activation != "silu":
        raise ModelError(f"hidden_act {activation!r} is not supported; only silu is.")
    hidden, heads, layers = int(config["hidden_size"]), int(config["num_attention_heads"]), config["num_hidden_layers"]
    attention_bias = kind == "qwen2" or bool(config.get("attention_bias"))
    rope = _parse_rope(config)
    parsed = ModelConfig(
        architecture=kind,
        vocab_size=int(config["vocab_size"]),
        hidden_size=hidden,
        intermediate_size=int(config["intermediate_size"]),
        layers=int(layers),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or (128 if kind == "qwen3" else hidden // heads)),
        norm_eps=float(config.get("rms_norm_eps") or 1e-6),
        max_context=_max_context(config, rope),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias and kind != "mistral",
        output_bias=attention_bias and kind in {"llama", "qwen3"},
        mlp_bias=kind == "llama" and bool(config.get("mlp_bias")),
        qk_norm=kind == "qwen3",
        rope=rope,
        windows=_parse_windows(config, kind, int(layers)),
        eos_token_ids=_parse_eos(config, generation),
        dtype=config.get("dtype") or config.get("torch_dtype"),
    )
    _check_heads(parsed)
    return parsed


def _check_heads(config: ModelConfig) -> None:
    sizes = (config.vocab_size, config.hidden_size, config.intermediate_size, config.layers, config.heads)
    if min(*sizes, config.kv_heads, config.head_dim, config.max_context) < 1:
        raise ModelError("all sizes must be at least 1.")
    if config.heads % config.kv_heads:
        raise ModelError(f"{config.heads} attention heads do not divide into {config.kv_heads} key/value heads.")
    if config.head_dim % 2:
        raise ModelError(f"head_dim {config.head_dim} is odd; rotary embedding needs pairs of dimensions.")


def _parse_rope(config: Json) -> RopeConfig:
    """Parses `rope_parameters` with the theta inside (transformers 5), or `rope_theta` and `rope_scaling` (4)."""
    found = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = found.get("rope_type") or found.get("type") or "default"
    if kind not in _SUPPORTED_ROPE:
        raise ModelError(f"RoPE scaling {kind!r} is not supported; supported are {', '.join(_SUPPORTED_ROPE)}.")
    if float(found.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ModelError("a partial_rotary_factor other than 1 is not supported.")
    theta = float(found.get("rope_theta") or config.get("rope_theta") or 10000.0)
    if kind == "default":
        return RopeConfig(theta=theta)
    # Phi-style files keep the original context at the top level, which takes precedence in transformers.
    original = config.get("original_max_position_embeddings") or found.get("original_max_position_embeddings")
    original_context = int(original or config["max_position_embeddings"])
    stretched = int(config["max_position_embeddings"]) / original_context
    factor = float(found["factor"] if found.get("factor") is not None or kind != "yarn" else stretched)
    defaults = RopeConfig()
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=factor,
        original_context=original_context,
        low_freq_factor=float(found.get("low_freq_factor") or defaults.low_freq_factor),
        high_freq_factor=float(found.get("high_freq_factor") or defaults.high_freq_factor),
        beta_fast=float(found.get("beta_fast") or defaults.beta_fast),
        beta_slow=float(found.get("beta_slow") or defaults.beta_slow),
        attention_factor=_attention_factor(found, factor) if kind == "yarn" else 1.0,
        truncate=bool(found.get("truncate", True)),
    )


def _attention_factor(found: Json, factor: float) -> float:
    """Returns YaRN's temperature on attention, folded into cos and sin (Peng et al. 2023, section 3.4)."""
    if found.get("attention_factor") is not None:
        return float(found["attention_factor"])

    def temperature(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if found.get("mscale") and found.get("mscale_all_dim"):
        return temperature(float(found["mscale"])) / temperature(float(found["mscale_all_dim"]))
    return temperature(1.0)


def _max_context(config: Json, rope: RopeConfig) -> int:
    """Returns the largest context; files with YaRN may still state the context before stretching."""
    stated = int(config["max_position_embeddings"])
    return max(stated, int(rope.original_context * rope.factor)) if rope.kind == "yarn" else stated


def _parse_windows(config: Json, kind: str, layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window", 4096)  # transformers' own default
    if window is None or kind == "llama":
        return (None,) * layers
    if kind == "mistral":
        return (int(window),) * layers
    if not config.get("use_sliding_window"):
        return (None,) * layers
    first = int(config.get("max_window_layers", 28))
    kinds = config.get("layer_types") or [
        "sliding_attention" if i >= first else "full_attention" for i in range(layers)
    ]
    if len(kinds) != layers:
        raise ModelError(f"layer_types names {len(kinds)} layers, num_hidden_layers is {layers}.")
    return tuple(int(window) if each == "sliding_attention" else None for each in kinds)


def _parse_eos(config: Json, generation: Json) -> tuple[int, ...]:
    """Returns the EOS ids; the generation configuration wins, as chat models may end a turn with another token."""
    found = generation.get("eos_token_id")
    if found is None:
        found = config.get("eos_token_id")
    if found is None:
        return ()
    return tuple(int(each) for each in found) if isinstance(found, list) else (int(found),)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(parsed, dict):
        raise ModelError(f"{path} holds no JSON object.")
    return parsed


def _reason(error: Exception) -> str:
    return f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
