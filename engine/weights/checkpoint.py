"""A model folder in Hugging Face layout: checked by its headers alone, then read directly into its tensors."""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from engine.config.model import ModelConfig, load_model_config
from engine.models.parameters import allocate_parameters, destinations
from engine.weights.safetensors_file import TensorEntry, read_header
from engine.weights.tensor_reader import DTYPES, read_tensors
from wire.errors import ModelError

Progress = Callable[[str, float], None]
"""Called with the name of an activity and its completed part, 0 to 1."""

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_NAMED_AT_MOST = 3
_REVISION_BYTES = 4096
"""Bytes of each tensor that go into the revision: 1.2 MB for a model of 32 layers."""


def check_model(folder: Path) -> ModelConfig:
    """Returns the configuration of a model that can be served; no weights are read.

    Raises ModelError, in one sentence: no folder or configuration, an unsupported architecture, a truncated or corrupt
    file, tensors missing, extra or of the wrong shape.
    """
    config = load_model_config(folder)
    shapes = allocate_parameters(config, torch.float32, torch.device("meta"))
    _match(folder, _read_entries(folder), destinations(shapes, config), config)
    return config


def load_weights(
    folder: Path, config: ModelConfig, into: Mapping[str, Tensor], progress: Progress | None = None
) -> None:
    """Copies every tensor of the folder to its view in `into` (by name), cast to the view's dtype during the copy.

    Raises ModelError as `check_model` does. The host holds no second copy, see `tensor_reader`.
    """
    entries = _match(folder, _read_entries(folder), into, config)
    total = sum(into[name].numel() for name in entries)
    done = 0

    def count(elements: int) -> None:
        nonlocal done
        done += elements
        if progress is not None:
            progress("loading weights", done / total)

    read_tensors(entries, into, count)


def revision_hash(folder: Path) -> str:
    """Returns the name of this revision of the model, in hex.

    It is the SHA-256 over config.json, every tensor's name, dtype and shape, and the first bytes of each, so that a
    fine-tuned model of equal shapes has another name, at little cost.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for name, entry in sorted(_read_entries(folder).items()):
        digest.update(f"{name} {entry.dtype} {entry.shape}".encode())
        with entry.file.open("rb") as stream:
            stream.seek(entry.start)
            digest.update(stream.read(_REVISION_BYTES))
    return digest.hexdigest()


def stored_dtype(folder: Path) -> str:
    """Returns the dtype of the folder's largest tensor, in torch's spelling."""
    largest = max(_read_entries(folder).values(), key=lambda entry: _elements(entry.shape))
    known = DTYPES.get(largest.dtype)
    return largest.dtype if known is None else str(known).removeprefix("torch.")


def _files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if not index.is_file():
        if not (folder / _SINGLE).is_file():
            raise ModelError(f"{folder} has neither {_SINGLE} nor {_INDEX}; only safetensors weights are read.")
        return [folder / _SINGLE]
    try:
        names = sorted(str(name) for name in set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is corrupt ({error}); download it again.") from error
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise ModelError(f"{folder} lacks {name}, which {_INDEX} names; download it again.")
    return [folder / name for name in names]


def _read_entries(folder: Path) -> dict[str, TensorEntry]:
    found: dict[str, TensorEntry] = {}
    for file in _files(folder):
        for name, entry in read_header(file).items():
            if name in found:
                raise ModelError(f"tensor {name} is in both {found[name].file} and {file}; keep one.")
            found[name] = entry
    return found


def _match(
    folder: Path, found: Mapping[str, TensorEntry], wanted: Mapping[str, Tensor], config: ModelConfig
) -> dict[str, TensorEntry]:
    """Returns the entries to load, all of them wanted, none missing, each of its shape."""
    missing = [name for name in wanted if name not in found]
    if missing:
        raise ModelError(f"{folder} lacks {_some(missing)}, which its config.json calls for.")
    extra = [name for name in found if name not in wanted and not _harmless(name, config)]
    if extra:
        raise ModelError(f"{folder} has {_some(extra)}, which a {config.architecture} model of its config.json lacks.")
    for name, place in wanted.items():
        entry = found[name]
        if entry.shape != tuple(place.shape):
            raise ModelError(
                f"{entry.file}: {name} has shape {list(entry.shape)}, config.json calls for {list(place.shape)}."
            )
        if entry.dtype not in DTYPES:
            raise ModelError(
                f"{entry.file}: {name} is stored as {entry.dtype}; only {', '.join(sorted(DTYPES))} can be loaded."
            )
    return {name: found[name] for name in wanted}


def _harmless(name: str, config: ModelConfig) -> bool:
    """Returns True for tensors of old exports that may be ignored: RoPE's constants and a copy of tied embeddings."""
    return name.endswith("rotary_emb.inv_freq") or (config.tied_embeddings and name == "lm_head.weight")


def _some(names: list[str]) -> str:
    named = ", ".join(names[:_NAMED_AT_MOST])
    rest = len(names) - _NAMED_AT_MOST
    return f"tensor {named}" + (f" and {rest} more" if rest > 0 else "")


def _elements(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
