"""Reading of a model's specification from a folder in Hugging Face layout."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.config.model import ModelSpec
from engine.models.families import family_of
from engine.models.families.family import Json, parse_eos
from wire.errors import ModelError


def load_spec(folder: Path) -> ModelSpec:
    """Reads `config.json` and, if it exists, `generation_config.json`; ModelError names the file and the problem."""
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder; give a folder in Hugging Face layout or a GGUF file.")
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json; a model folder needs config.json, safetensors and a tokenizer.")
    config = read_json(folder / "config.json")
    generation_file = folder / "generation_config.json"
    generation = read_json(generation_file) if generation_file.is_file() else {}
    try:
        return parse_spec(config, generation)
    except ModelError as error:
        raise ModelError(f"{folder / 'config.json'}: {error.message}") from error
    except (KeyError, TypeError, ValueError, ZeroDivisionError, AttributeError) as error:
        raise ModelError(
            f"{folder / 'config.json'}: {_reason(error)}; the file is not a complete model configuration."
        ) from error


def parse_spec(config: Json, generation: Json | None = None) -> ModelSpec:
    """Returns the specification from the two parsed files, in the spelling of transformers 4 or 5.

    Raises ModelError for what is not supported, KeyError, TypeError or ValueError for a malformed configuration.
    """
    if config.get("quantization_config"):
        method = dict(config["quantization_config"]).get("quant_method")
        raise ModelError(
            f"the checkpoint is quantized ({method}), which is not supported; use one in bfloat16, float16 or float32."
        )
    spec = family_of(config).parse(config)
    # Chat models may end a turn with another token than a text, and the generation configuration names it.
    ends = parse_eos(generation or {})
    return replace(spec, eos_token_ids=ends) if ends else spec


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object of a file; ModelError if it has none."""
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(parsed, dict):
        raise ModelError(f"{path} holds no JSON object.")
    return parsed


def _reason(error: Exception) -> str:
    return f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
