"""Checks a model folder in Hugging Face layout by its headers, and reads its weights directly into the model."""

import hashlib
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from tandem.engine.config.kv import kv_layer_of
from tandem.engine.config.model import ModelSpec
from tandem.engine.config.quantization import Quantization, WeightScheme
from tandem.engine.config.sharding import ALONE, Rank, rank_spec
from tandem.engine.models.allocation import QuantizedWeights, allocate_parameters, quantized_weights
from tandem.engine.models.families import slots_of
from tandem.engine.models.load_spec import load_spec, read_json, text_part, towers_of
from tandem.engine.models.parameters import Parameters
from tandem.engine.models.rank_parameters import rank_slots
from tandem.engine.models.slots import ParameterSlot
from tandem.engine.weights.quantized.format import StoredTensor
from tandem.engine.weights.quantized_loader import load_quantized, stored_tensors
from tandem.engine.weights.safetensors_file import TensorEntry, read_header
from tandem.engine.weights.tensor_reader import DTYPES, FLOATS, read_tensors
from tandem.protocol.errors import ModelError

_T = TypeVar("_T")
_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.", ""),
    *((name, name) for name in ("model.embed_tokens.", "model.layers.", "model.norm.", "lm_head.")),
)
"""Pairs of name prefixes of the text model's tensors: in multimodal checkpoints, and in text-only checkpoints."""
_ATTENTION_SCALES = tuple(f".{part}_{kind}" for part in ("q", "k", "v", "kv") for kind in ("scale", "zero_point"))
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_SINGLE_EXPERT = re.compile(r"model\.layers\.\d+\.(.*\.)?experts\.\d+\.")
_OWN_KV = re.compile(r"model\.layers\.\d+\.self_attn\.[kv]_(proj|norm)\.")
_PREDICTING_MODULE = re.compile(r"(model\.)?mtp[._]")
"""Begins the names of multi-token prediction modules that are not numbered as layers (Qwen3-Next, MiMo, ERNIE 4.5)."""


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Translates the tensor names of a folder to those of a text-only checkpoint.

    Multimodal checkpoints prefix the names of the text model's tensors; all their other tensors belong to the towers.
    """

    spec: ModelSpec
    multimodal: bool
    predicting_layers: int
    """The number of multi-token prediction layers after the model's own layers (DeepSeek-V3, GLM-4.5).

    They are not part of the model; `MtpLayer` reads the first of them.
    """

    @classmethod
    def of(cls, spec: ModelSpec, config: Mapping[str, Any]) -> "TensorNames":
        """Return the name translation of a folder with this spec and config.json."""
        text = text_part(config)
        return cls(spec, text is not config, int(text.get("num_nextn_predict_layers") or 0))

    def text_model(self, entries: Mapping[str, _T]) -> dict[str, _T]:
        """Return the entries of the text model's tensors, by their names in a text-only checkpoint."""
        if not self.multimodal:
            return dict(entries)
        return {text: entry for name, entry in entries.items() if (text := _text_name(name)) is not None}

    def is_harmless(self, name: str) -> bool:
        """Return True if a tensor that the model does not use may be ignored.

        These are RoPE constants and copies of tied embeddings in old exports, multi-token prediction layers, scales
        with which other servers quantize queries, keys and values, and projections of keys and values in layers that
        use those of another layer.
        """
        if self.spec.quantization is not None and name.endswith(_ATTENTION_SCALES):
            return True
        if name.endswith("rotary_emb.inv_freq") or (self.spec.tied_embeddings and name == "lm_head.weight"):
            return True
        if _PREDICTING_MODULE.match(name):
            return True
        layer, own = _LAYER.match(name), len(self.spec.layers)
        if layer is not None and int(layer[1]) < own and _OWN_KV.match(name):
            return kv_layer_of(self.spec.layers[int(layer[1])]) is not None
        return layer is not None and own <= int(layer[1]) < own + self.predicting_layers


def _text_name(name: str) -> str | None:
    """Return the tensor's name in a text-only checkpoint; None for a tensor of a tower."""
    for prefix, text in _PREFIXES:
        if name.startswith(prefix):
            return text + name.removeprefix(prefix)
    return None


log = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
"""A callback that gets the name of an activity and its completed fraction, 0 to 1."""

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_NAMED_AT_MOST = 3
_MOST_FILES = 10_000
"""Maximum number of weight files of a folder; the largest published models have a few hundred."""
_REVISION_BYTES = 4096
"""The number of leading bytes of each tensor that the revision hash includes: 1.2 MB in total for 32 layers."""


def check_model(folder: Path) -> ModelSpec:
    """Check from the headers that a model can be served, and return its spec; no weights are read.

    Modules that a quantized checkpoint stores in 16 bits count as not quantized, even if config.json says otherwise.
    Raises ModelError, with one sentence, if there is no folder or configuration, if the architecture is not supported,
    if a file is truncated or corrupt, or if tensors are missing, unknown or of the wrong shape.
    """
    spec = load_spec(folder)
    names = TensorNames.of(spec, read_json(folder / "config.json"))
    entries = names.text_model(read_entries(folder))
    spec = replace(spec, separate_experts=separates_experts(entries))
    names = replace(names, spec=spec)
    slots = slots_of(spec, allocate_parameters(spec, torch.float32, torch.device("meta")))
    if spec.quantization is not None:
        spec = replace(spec, quantization=as_stored(spec.quantization, slots, quantized_weights(spec), entries))
        # A family may store a weight in another layout if it is not quantized.
        slots = slots_of(spec, allocate_parameters(spec, torch.float32, torch.device("meta")))
        names = replace(names, spec=spec)
    match_entries(folder, slots, names, entries)
    return spec


def load_weights(
    folder: Path, spec: ModelSpec, parameters: Parameters, progress: Progress | None = None, rank: Rank = ALONE
) -> None:
    """Copy every tensor of the folder, or the part of `rank`, to its slot in `parameters`, cast to the slot's dtype.

    Slots on the `meta` device are skipped. Raises ModelError as `check_model` does. The host holds no second copy of
    the weights (see `tensor_reader`), except of one tensor at a time if its values are transformed or divided among
    ranks.
    """
    slots = rank_slots(spec, rank, parameters)
    config = read_json(folder / "config.json")
    names = TensorNames.of(spec, config)
    entries = match_entries(folder, slots, names, names.text_model(read_entries(folder)))
    quantized = quantized_weights(rank_spec(spec, rank.count, rank.number))
    if quantized.dequantized:
        log.info(
            "%s: %s of %s quantized tensors are dequantized, as their columns or layers are in no order of the kernels",
            folder,
            len(quantized.dequantized),
            len(quantized.schemes),
        )
    if text_part(config) is not config:
        log.info("%s: the text part is served, images and the like are not (%s)", folder, towers_of(config))
    read_slots(slots, quantized.schemes, entries, progress)


def read_slots(
    slots: Mapping[str, ParameterSlot],
    schemes: Mapping[str, WeightScheme],
    entries: Mapping[str, TensorEntry],
    progress: Progress | None = None,
) -> None:
    """Copy the tensors of `entries` to their slots, except those on the `meta` device.

    `schemes` are the quantization schemes of a model's tensors, and `entries` are those of `match_entries`.
    """
    slots = {name: slot for name, slot in slots.items() if slot.tensor.device.type != "meta"}
    schemes = {name: scheme for name, scheme in schemes.items() if name in slots}
    total = sum(_elements(entry.shape) for entry in entries.values())
    done = 0

    def count(elements: int) -> None:
        nonlocal done
        done += elements
        if progress is not None:
            progress("loading weights", done / total)

    plain: dict[str, Tensor] = {}
    for name, slot in slots.items():
        if name in schemes:
            continue
        assert isinstance(slot.tensor, Tensor)
        if slot.transform is None and slot.part is None and slot.tensor.is_contiguous():
            plain[name] = slot.tensor
        else:
            _read_transformed(name, entries[name], slot, count)
    if plain:
        read_tensors({name: entries[name] for name in plain}, plain, count)
    load_quantized(slots, schemes, entries, count)


def revision_hash(folder: Path) -> str:
    """Return a hash that identifies this revision of the model, in hex.

    It is the SHA-256 of config.json, of every tensor's name, dtype and shape, and of the first bytes of each tensor. So
    a fine-tuned model of equal shapes has another hash, at little cost.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for name, entry in sorted(read_entries(folder).items()):
        digest.update(f"{name} {entry.dtype} {entry.shape}".encode())
        with entry.file.open("rb") as stream:
            stream.seek(entry.start)
            digest.update(stream.read(_REVISION_BYTES))
    return digest.hexdigest()


def weight_file_facts(folder: Path) -> tuple[tuple[str, str], ...]:
    """Return the name of each weight file of a folder, with its size in bytes and its modification time.

    They change with any later write to the weights, which `revision_hash` may not notice. Empty without weight files.
    """
    stats = ((file.name, file.stat()) for file in sorted(folder.glob("*.safetensors")))
    return tuple((name, f"{stat.st_size} bytes, {stat.st_mtime_ns} ns") for name, stat in stats)


def stored_dtype(folder: Path) -> str:
    """Return the dtype of the folder's largest tensor that is not quantized, in torch's spelling."""
    entries = read_entries(folder).values()
    floats = [entry for entry in entries if entry.dtype in FLOATS]
    largest = max(floats or entries, key=lambda entry: _elements(entry.shape))
    return str(DTYPES.get(largest.dtype, largest.dtype)).removeprefix("torch.")


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a folder: those named in its index, if it has one.

    Raises ModelError if any is missing.
    """
    index = folder / _INDEX
    if not index.is_file():
        if not (folder / _SINGLE).is_file():
            raise ModelError(f"{folder} has neither {_SINGLE} nor {_INDEX}; only safetensors weights are read.")
        return [folder / _SINGLE]
    try:
        listed = set(read_json(index)["weight_map"].values())
        if len(listed) > _MOST_FILES:
            raise ModelError(f"{index} names {len(listed)} files, more than {_MOST_FILES}; it is no file of a model.")
        names = sorted(map(str, listed))
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is corrupt ({error}); download it again.") from error
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise ModelError(f"{folder} lacks {name}, which {_INDEX} names; download it again.")
    return [folder / name for name in names]


def read_entries(folder: Path) -> dict[str, TensorEntry]:
    """Return the header entries of all tensors in a folder's weight files, by name.

    Raises ModelError for files that cannot be read.
    """
    entries: dict[str, TensorEntry] = {}
    for file in weight_files(folder):
        for name, entry in read_header(file).items():
            if name in entries:
                raise ModelError(f"tensor {name} is in both {entries[name].file} and {file}; keep one.")
            entries[name] = entry
    return entries


def separates_experts(names: Iterable[str]) -> bool:
    """Return True if tensors of a text model's layers, by their `names`, are those of single experts."""
    return any(_SINGLE_EXPERT.match(name) for name in names)


def as_stored(
    quantization: Quantization,
    slots: Mapping[str, ParameterSlot],
    quantized: QuantizedWeights,
    entries: Mapping[str, TensorEntry],
) -> Quantization:
    """Return the quantization; modules that the checkpoint stores in 16 bits or more count as not quantized.

    Only the modules of `slots` are looked up.
    """
    plain = set()
    for name in quantized.schemes.keys() & slots.keys():
        scheme = quantized.schemes[name]
        codes = next(iter(stored_tensors(name, slots[name], scheme)))
        stored_plainly = name in entries and entries[name].dtype in FLOATS
        if stored_plainly and not quantization.at_load and (codes == name or codes not in entries):
            plain.add(name.removesuffix(".weight"))
    return replace(quantization, plain=quantization.plain | plain) if plain else quantization


def match_entries(
    folder: Path, slots: Mapping[str, ParameterSlot], names: TensorNames, entries: Mapping[str, TensorEntry]
) -> dict[str, TensorEntry]:
    """Return the entries to load, by name. Raises ModelError if any is missing, unknown, or of a wrong shape or dtype.

    `slots` are those of the model of `names`, or of a part of it.
    """
    schemes = quantized_weights(names.spec).schemes
    wanted: dict[str, StoredTensor] = {}
    of: dict[str, WeightScheme | None] = {}
    for name, slot in slots.items():
        stored = stored_tensors(name, slot, schemes.get(name))
        # A bias that the model has takes precedence over a bias tensor that the weight's format allows.
        wanted |= {
            stored_name: tensor for stored_name, tensor in stored.items() if tensor.read or stored_name not in slots
        }
        of |= dict.fromkeys(stored, schemes.get(name))
    missing = [name for name, tensor in wanted.items() if tensor.required and name not in entries]
    if missing:
        raise ModelError(f"{folder} lacks {_some(missing)}, which its config.json calls for{_named(of[missing[0]])}.")
    extra = [name for name in entries if name not in wanted and not names.is_harmless(name)]
    if extra:
        raise ModelError(f"{folder} has {_some(extra)}, which a model of its config.json lacks.")
    read = {name: tensor for name, tensor in wanted.items() if tensor.read and name in entries}
    for name, tensor in read.items():
        entry = entries[name]
        if entry.shape not in tensor.shapes:
            shape = list(tensor.shapes[-1])
            raise ModelError(
                f"{entry.file}: {name} has shape {list(entry.shape)}, config.json calls for {shape}{_named(of[name])}."
            )
        if entry.dtype not in tensor.dtypes:
            raise ModelError(
                f"{entry.file}: {name} is stored as {entry.dtype}; only {', '.join(sorted(tensor.dtypes))} can be"
                f" loaded{_named(of[name])}."
            )
    return {name: entries[name] for name in read}


def _named(scheme: WeightScheme | None) -> str:
    """Return a description of a weight's scheme for an error message; "" if it has none."""
    if scheme is None:
        return ""
    group = "a scale a row" if scheme.group is None else f"groups of {scheme.group}"
    return f" ({scheme.format}, {scheme.codes}, {group})"


def _read_transformed(name: str, entry: TensorEntry, slot: ParameterSlot, count: Callable[[int], None]) -> None:
    """Read one tensor into host memory, transform it or take this rank's part, and write the result to the slot."""
    assert isinstance(slot.tensor, Tensor)
    stored = torch.empty(entry.shape, dtype=slot.tensor.dtype)
    read_tensors({name: entry}, {name: stored}, count)
    slot.tensor.copy_(slot.values(stored))


def _some(names: list[str]) -> str:
    named = ", ".join(names[:_NAMED_AT_MOST])
    rest = len(names) - _NAMED_AT_MOST
    return f"tensor {named}" + (f" and {rest} more" if rest > 0 else "")


def _elements(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
