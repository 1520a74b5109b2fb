"""Reads JSON files of a model folder, such as the generation defaults."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.protocol.errors import ModelError


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Default sampling values from the model's generation_config.json; a missing value has no effect on sampling."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in the file `folder/name`; empty if the file does not exist.

    Raises ModelError if the file does not have a JSON object.
    """
    path = folder / name
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path} cannot be read as JSON ({error}); restore the file from the model's source"
        ) from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object; restore the file from the model's source")
    return value


def read_generation_defaults(folder: Path) -> GenerationDefaults:
    """Return the model's default sampling values; values that the model does not define have no effect on sampling."""
    values = read_json(folder, "generation_config.json")
    plain = GenerationDefaults()

    def pick(name: str, fallback: float) -> float:
        value = values.get(name)
        return fallback if not isinstance(value, int | float) or isinstance(value, bool) else value

    return GenerationDefaults(
        temperature=float(pick("temperature", plain.temperature)),
        top_k=int(pick("top_k", plain.top_k)),
        top_p=float(pick("top_p", plain.top_p)),
        min_p=float(pick("min_p", plain.min_p)),
        repetition_penalty=float(pick("repetition_penalty", plain.repetition_penalty)),
    )
