"""Reads a model's spec from a folder in Hugging Face layout."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tandem.engine.config.model import ModelSpec, rope_of
from tandem.engine.config.quantization import AT_LOAD, at_load, check_patterns
from tandem.engine.models.families import family_of, is_supported
from tandem.engine.models.families.family import Json, parse_eos
from tandem.engine.models.quantization_config import parse_quantization
from tandem.engine.models.size_limits import check_limits
from tandem.protocol.errors import InvalidArgument, ModelError

_QUANTIZED = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
"""Files in which quantized checkpoints may store their settings, each with the quantization method that it implies."""
_TOWERS = ("vision_config", "audio_config", "speech_config", "image_config", "video_config", "sound_config")
"""Fields of config.json that describe the non-text parts (towers) of a multimodal model."""
LARGEST_JSON = 24 << 20
"""Maximum size of a JSON file in bytes.

An index of more than 200,000 tensor names has this size, and takes a second to read.
"""
_SHARED_FIELDS = ("eos_token_id", "tie_word_embeddings", "dtype", "torch_dtype")
"""Fields that a multimodal model may have only outside of `text_config`."""


def load_spec(folder: Path) -> ModelSpec:
    """Read a model's spec from config.json and, if it exists, generation_config.json.

    Raises ModelError, which names the file and the problem.
    """
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder; give a folder in Hugging Face layout or a GGUF file.")
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json; a model folder needs config.json, safetensors and a tokenizer.")
    config = read_json(folder / "config.json")
    generation_file = folder / "generation_config.json"
    generation = read_json(generation_file) if generation_file.is_file() else {}
    with naming_the_file(folder / "config.json"):
        if not _quantization(text_part(config)):
            config |= _separate_quantization(folder)
        return parse_spec(config, generation)


@contextmanager
def naming_the_file(file: Path) -> Iterator[None]:
    """Convert errors of `parse_spec` in the `with` block into a ModelError that names the file."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{file}: {error.message}") from error
    except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise ModelError(f"{file}: {_reason(error)}; the file is not a complete model configuration.") from error


def parse_spec(config: Json, generation: Json | None = None) -> ModelSpec:
    """Return the spec that config.json and generation_config.json describe, with fields as in transformers 4 or 5.

    Raises ModelError if something is not supported, and KeyError, TypeError or ValueError if the configuration is
    malformed.
    """
    config = text_part(config)
    check_limits(config)
    spec = family_of(config).parse(config)
    if quantization := _quantization(config):
        parsed = parse_quantization(dict(quantization))
        try:
            check_patterns(parsed)
        except re.error as error:
            raise ModelError(f"quantization_config names modules by {error.pattern!r}: {error}.") from error
        spec = replace(spec, quantization=parsed, separate_experts=parsed.separates_experts)
    # Chat models may end a turn with a different token than a text; generation_config.json names it.
    ends = parse_eos(generation or {})
    return replace(spec, eos_token_ids=ends) if ends else spec


def quantized_at_load(spec: ModelSpec, name: str | None) -> ModelSpec:
    """Return the spec with the layers' weights quantized while they are loaded.

    `name` is one of `AT_LOAD`; None = as stored. Raises InvalidArgument for another name, or if the checkpoint is
    already quantized.
    """
    if name is None:
        return spec
    if name not in AT_LOAD:
        raise InvalidArgument("quantization", f"{name!r} is not known; use {', '.join(AT_LOAD)}.")
    if spec.quantization is not None:
        raise InvalidArgument(
            "quantization",
            f"{name} is for weights of 16 bits, and the checkpoint is quantized already ({spec.quantization.method});"
            " leave it out.",
        )
    return replace(spec, quantization=at_load(name))


def bounded(spec: ModelSpec, max_model_len: int | None) -> ModelSpec:
    """Return the spec with a context length of `max_model_len` tokens; None = unchanged.

    Raises InvalidArgument if `max_model_len` is below 1, or above the larger of the model's context length and the
    length to which linear RoPE scaling extends it.
    """
    if max_model_len is None:
        return spec
    ropes = [rope for layer in spec.layers if (rope := rope_of(layer.attention)) is not None]
    stretched = (int(rope.original_context * rope.factor) for rope in ropes if rope.kind == "linear")
    longest = max([spec.max_context, *stretched])
    if not 1 <= max_model_len <= longest:
        raise InvalidArgument("max_model_len", f"is {max_model_len}, and the model's context has 1 to {longest} tokens")
    return replace(spec, max_context=max_model_len)


def text_part(config: Json) -> Json:
    """Return the config of the text model: `text_config` of a multimodal model, else `config` itself.

    A multimodal model without a `text_config` may have the fields of its text model beside those of the towers.

    Raises ModelError, which names the towers, for a multimodal model whose text model is not supported.
    """
    towers, text = towers_of(config), config.get("text_config")
    if not text and is_supported(config):
        return {name: value for name, value in config.items() if name not in _TOWERS} if towers else config
    if not (towers or text):
        return config
    name = next(iter(config.get("architectures") or ()), config.get("model_type"))
    if not text:
        raise ModelError(f"{name} is a multimodal model ({towers}) without a text_config, which is not supported.")
    outer = (*_SHARED_FIELDS, "quantization_config", "compression_config")
    text = {field: config[field] for field in outer if field in config} | dict(text)
    if config.get("tie_word_embeddings"):
        # Here the setting belongs to the outer model; without this line the text part would get the default of
        # transformers 5.
        text["tie_word_embeddings"] = True
    try:
        family_of(text)
    except ModelError as error:
        raise ModelError(f"{name} is a multimodal model ({towers or 'text_config'}): {error.message}") from error
    return text


def towers_of(config: Json) -> str:
    """Return the names of the fields that describe towers of a multimodal model; "" for a text model."""
    return ", ".join(name for name in _TOWERS if config.get(name))


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises ModelError if the file cannot be read, has no JSON object, or is larger than `LARGEST_JSON`.
    """
    try:
        if (size := path.stat().st_size) > LARGEST_JSON:
            raise ModelError(f"{path} has {size} bytes, more than {LARGEST_JSON}; it is no file of a model.")
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(parsed, dict):
        raise ModelError(f"{path} holds no JSON object.")
    return parsed


def _quantization(config: Json) -> Any:
    return config.get("quantization_config") or config.get("compression_config")


def _separate_quantization(folder: Path) -> dict[str, Any]:
    """Return the `quantization_config` that a folder has in a separate file; empty if it has none."""
    for name, method in _QUANTIZED.items():
        if (folder / name).is_file():
            return {"quantization_config": {"quant_method": method} | read_json(folder / name)}
    return {}


def _reason(error: Exception) -> str:
    return f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
