"""Reads a folder of Medusa heads, in the published layout (https://github.com/FasterDecoding/Medusa).

With L layers, head h has the tensors `{h}.{l}.linear.weight` [H, H] and `{h}.{l}.linear.bias` [H] for each layer l, and
`{h}.{L}.weight` [V, H], its projection to the vocabulary. As in vLLM, `original_lm_head` in config.json says that the
heads use the model's own projection instead. The tensor `token_map` [`truncated_vocab_size`] int64 has the ids of the
tokens that the heads can predict, one for each of the V rows of a projection; without it, V is the model's vocabulary
size.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.engine.config.model import ModelSpec
from tandem.engine.models.load_spec import read_json
from tandem.engine.weights.safetensors_file import TensorEntry, read_header
from tandem.engine.weights.tensor_reader import FLOATS
from tandem.protocol.errors import ModelError

CONFIG = "config.json"
WEIGHTS = ("medusa_lm_head.safetensors", "model.safetensors")
"""The possible names of the file with the tensors; published heads use the first."""
PICKLED = "medusa_lm_head.pt"
TOKEN_MAP = "token_map"
_TOKEN_BYTES = 8


@dataclass(frozen=True, slots=True)
class HeadsFolder:
    """The description of Medusa heads on disk: their sizes and tensors."""

    entries: Mapping[str, TensorEntry]
    """The tensors of all heads, and the token map if there is one."""
    heads: int
    layers: int
    """The number of layers that each head has before its projection."""
    vocabulary: int | None
    """The number of tokens that the heads can predict; None = the model's whole vocabulary."""
    own_projection: bool
    """True if each head has its own projection to the vocabulary."""

    def memory_bytes(self, spec: ModelSpec, item_bytes: int) -> int:
        """Return the memory in bytes that the heads need in addition to the model, with `item_bytes` per weight."""
        sizes = {name: math.prod(entry.shape) for name, entry in self.entries.items()}
        token_map = sizes.pop(TOKEN_MAP, 0)
        # For a smaller vocabulary, the rows of the model's own projection are copied, once for all heads.
        copied = 0 if self.own_projection else (self.vocabulary or 0) * spec.hidden_size
        return (sum(sizes.values()) + copied) * item_bytes + token_map * _TOKEN_BYTES


def layer_name(head: int, layer: int, part: str) -> str:
    """Return the tensor name of the `weight` or `bias` of a head's layer."""
    return f"{head}.{layer}.linear.{part}"


def projection_name(head: int, layers: int) -> str:
    """Return the name of the weight of a head's projection."""
    return f"{head}.{layers}.weight"


def check_final_norm(spec: ModelSpec) -> None:
    """Raise ModelError if a model's final norm, which heads apply to its hidden states, is not RMSNorm."""
    if spec.layer_norms:
        raise ModelError(
            f"{spec.architecture} has LayerNorm, for which there are no heads; draft with a model or n-grams."
        )


def read_heads(folder: Path, spec: ModelSpec) -> HeadsFolder:
    """Read the config and the tensor headers of a folder of Medusa heads.

    Raises ModelError, which says what is missing, malformed, or does not fit the model.
    """
    check_final_norm(spec)
    config = read_json(folder / CONFIG)
    heads, layers = _count(folder, config, "medusa_num_heads", None), _count(folder, config, "medusa_num_layers", 1)
    own = config.get("original_lm_head", False) is not True
    entries = read_header(_weights_file(folder))
    vocabulary = _vocabulary(folder, config, entries, spec)
    h = spec.hidden_size
    if heads * layers > len(entries):
        raise ModelError(f"{folder} has {len(entries)} tensors, fewer than {heads} heads of {layers} layers have.")
    wanted: dict[str, tuple[int, ...]] = {}
    for head in range(heads):
        for layer in range(layers):
            wanted |= {layer_name(head, layer, "weight"): (h, h), layer_name(head, layer, "bias"): (h,)}
        if own:
            wanted[projection_name(head, layers)] = (vocabulary or spec.vocab_size, h)
    tensors = {name: _fitting(folder, name, shape, entries, spec) for name, shape in wanted.items()}
    if vocabulary is not None:
        tensors[TOKEN_MAP] = entries[TOKEN_MAP]
    return HeadsFolder(tensors, heads, layers, vocabulary, own)


def _weights_file(folder: Path) -> Path:
    for name in WEIGHTS:
        if (folder / name).is_file():
            return folder / name
    if (folder / PICKLED).is_file():
        raise ModelError(
            f"{folder} has its heads as {PICKLED}, which may run code when it is read; save its tensors as {WEIGHTS[0]}"
            " with safetensors.torch.save_file."
        )
    raise ModelError(f"{folder} has neither {' nor '.join(WEIGHTS)}.")


def _count(folder: Path, config: Mapping[str, Any], field: str, absent: int | None) -> int:
    count = config.get(field, absent)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ModelError(f"{folder / CONFIG}: {field} is {count!r}, not a number of at least 1.")
    return count


def _vocabulary(
    folder: Path, config: Mapping[str, Any], entries: Mapping[str, TensorEntry], spec: ModelSpec
) -> int | None:
    for field, of_model in (("hidden_size", spec.hidden_size), ("vocab_size", spec.vocab_size)):
        if config.get(field, of_model) != of_model:
            raise ModelError(
                f"{folder / CONFIG}: {field} is {config[field]!r}, the model's is {of_model}; the heads are those of"
                " another model."
            )
    size = config.get("truncated_vocab_size", spec.vocab_size)
    if size == spec.vocab_size and TOKEN_MAP not in entries:
        return None
    size = _count(folder, config, "truncated_vocab_size", None)
    entry = entries.get(TOKEN_MAP)
    if entry is None:
        raise ModelError(f"{folder}: truncated_vocab_size is {size}, but the tensor {TOKEN_MAP} is missing.")
    if entry.dtype != "I64" or entry.shape != (size,) or size > spec.vocab_size:
        raise ModelError(
            f"{folder}: {TOKEN_MAP} is {entry.dtype} {list(entry.shape)}, not I64 [{size}] with tokens of a vocabulary"
            f" of {spec.vocab_size}."
        )
    return size


def _fitting(
    folder: Path, name: str, shape: tuple[int, ...], entries: Mapping[str, TensorEntry], spec: ModelSpec
) -> TensorEntry:
    entry = entries.get(name)
    if entry is None:
        raise ModelError(f"{folder} has no tensor {name}, which {CONFIG} promises.")
    if entry.dtype not in FLOATS:
        raise ModelError(f"{folder}: {name} is stored as {entry.dtype}, not in 16 or 32 bits.")
    if entry.shape != shape:
        raise ModelError(
            f"{folder}: {name} is {list(entry.shape)}, not {list(shape)} as for a model with a hidden size of"
            f" {spec.hidden_size} and {spec.vocab_size} tokens; the heads are those of another model."
        )
    return entry
