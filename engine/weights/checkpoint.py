"""A model folder in Hugging Face layout: checked by its headers alone, then read directly into its tensors."""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from engine.config.model import ModelSpec
from engine.models.families import places_of
from engine.models.load_spec import load_spec, read_json, text_part, towers_of
from engine.models.parameters import Parameters, Place, allocate_parameters
from engine.weights.safetensors_file import TensorEntry, read_header
from engine.weights.tensor_names import TensorNames
from engine.weights.tensor_reader import DTYPES, read_tensors
from wire.errors import ModelError

log = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
"""Called with the name of an activity and its completed part, 0 to 1."""

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_NAMED_AT_MOST = 3
_REVISION_BYTES = 4096
"""Bytes of each tensor that go into the revision: 1.2 MB for a model of 32 layers."""


def check_model(folder: Path) -> ModelSpec:
    """Returns the specification of a model that can be served; no weights are read.

    Raises ModelError, in one sentence: no folder or configuration, an unsupported architecture, a truncated or corrupt
    file, tensors missing, extra or of the wrong shape.
    """
    spec = load_spec(folder)
    shapes = allocate_parameters(spec, torch.float32, torch.device("meta"))
    _match(folder, places_of(spec, shapes), spec)
    return spec


def load_weights(folder: Path, spec: ModelSpec, parameters: Parameters, progress: Progress | None = None) -> None:
    """Copies every tensor of the folder to its place in `parameters`, cast to the place's dtype during the copy.

    Raises ModelError as `check_model` does. The host holds no second copy, see `tensor_reader`, but of one tensor at a
    time among those whose values are transformed.
    """
    places = places_of(spec, parameters)
    entries = _match(folder, places, spec)
    config = read_json(folder / "config.json")
    if text_part(config) is not config:
        log.info("%s: the text part is served, images and the like are not (%s)", folder, towers_of(config))
    total = sum(place.tensor.numel() for place in places.values())
    done = 0

    def count(elements: int) -> None:
        nonlocal done
        done += elements
        if progress is not None:
            progress("loading weights", done / total)

    plain = {
        name: place.tensor for name, place in places.items() if place.transform is None and place.tensor.is_contiguous()
    }
    read_tensors({name: entries[name] for name in plain}, plain, count)
    for name in places.keys() - plain.keys():
        _read_transformed(name, entries[name], places[name], count)


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


def _match(folder: Path, wanted: Mapping[str, Place], spec: ModelSpec) -> dict[str, TensorEntry]:
    """Returns the entries to load, all of them wanted, none missing, each of its shape."""
    names = TensorNames.of(spec, read_json(folder / "config.json"))
    found = names.text_model(_read_entries(folder))
    missing = [name for name in wanted if name not in found]
    if missing:
        raise ModelError(f"{folder} lacks {_some(missing)}, which its config.json calls for.")
    extra = [name for name in found if name not in wanted and not names.is_harmless(name)]
    if extra:
        raise ModelError(f"{folder} has {_some(extra)}, which a model of its config.json lacks.")
    for name, place in wanted.items():
        entry = found[name]
        if entry.shape != place.stored_shape:
            raise ModelError(
                f"{entry.file}: {name} has shape {list(entry.shape)}, config.json calls for {list(place.stored_shape)}."
            )
        if entry.dtype not in DTYPES:
            raise ModelError(
                f"{entry.file}: {name} is stored as {entry.dtype}; only {', '.join(sorted(DTYPES))} can be loaded."
            )
    return {name: found[name] for name in wanted}


def _read_transformed(name: str, entry: TensorEntry, place: Place, count: Callable[[int], None]) -> None:
    """Reads one tensor into the host's memory, and writes the values that are computed from it to their place."""
    stored = torch.empty(entry.shape, dtype=place.tensor.dtype)
    read_tensors({name: entry}, {name: stored}, count)
    place.tensor.copy_(stored if place.transform is None else place.transform(stored))


def _some(names: list[str]) -> str:
    named = ", ".join(names[:_NAMED_AT_MOST])
    rest = len(names) - _NAMED_AT_MOST
    return f"tensor {named}" + (f" and {rest} more" if rest > 0 else "")


def _elements(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
