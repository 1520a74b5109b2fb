"""Reads an EAGLE head's folder, in the layout of published checkpoints (https://github.com/SafeAILab/EAGLE).

config.json is that of a model with one layer. `fc.weight` [H, 2·H], and `fc.bias` [H] if present, compute the input of
the layer from the embedding of a token and the hidden state that the token was sampled from. `layers.0.…` are the
weights of the layer under their usual names, without `input_layernorm`. Embedding and output projection are those of
the target model, so `embed_tokens.weight` is not read. As in later layouts, `d2t` [`draft_vocab_size`] int64 limits the
tokens that the head can predict: its output n is the token n + d2t[n].
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from tandem.engine.config.model import DenseFeedForward, GroupedQueryAttention, ModelSpec
from tandem.engine.models.allocation import allocate_parameters
from tandem.engine.models.families import is_supported, slots_of
from tandem.engine.models.load_spec import naming_the_file, parse_spec, read_json
from tandem.engine.models.parameters import Parameters, ParameterSlot
from tandem.engine.speculation.heads.folder import check_final_norm
from tandem.engine.weights.checkpoint import read_entries
from tandem.engine.weights.safetensors_file import TensorEntry
from tandem.engine.weights.tensor_reader import FLOATS
from tandem.protocol.errors import ModelError

CONFIG = "config.json"
PICKLED = "pytorch_model.bin"
PRODUCT, BIAS, TOKEN_OFFSETS = "fc.weight", "fc.bias", "d2t"
STATES_A_ROW = 2
"""The number of hidden states that a row of the head's steps needs: its input and its output."""
_EMBEDDING = "embed_tokens.weight"
_LAYER, _FIRST_NORM = "layers.0.", "layers.0.input_layernorm.weight"


@dataclass(frozen=True, slots=True)
class EagleFolder:
    """The description of an EAGLE head on disk: its spec and its tensors."""

    spec: ModelSpec
    """The spec of a model with the head's one layer and the target's vocabulary."""
    entries: Mapping[str, TensorEntry]
    """The tensors that the head is read from, by name."""
    vocabulary: int | None
    """The number of tokens that the head can predict; None = the model's whole vocabulary."""

    def memory_bytes(self, item_bytes: int) -> int:
        """Return the bytes of the head's own weights, which it does not share with the model.

        Each weight has `item_bytes` bytes.
        """
        own_bytes = sum(prod(entry.shape) * item_bytes for name, entry in self.entries.items() if name != TOKEN_OFFSETS)
        rows = self.vocabulary or 0
        return own_bytes + rows * (self.spec.hidden_size * item_bytes + torch.int64.itemsize)


def is_eagle(folder: Path, config: Mapping[str, Any]) -> bool:
    """Return True if the folder with this config.json contains an EAGLE head, in any layout."""
    named = " ".join(map(str, config.get("architectures") or ()))
    if "eagle" in named.lower():
        return is_supported(_layer_config(config)) or _is_third(config, {})
    if config.get("num_hidden_layers") != 1:
        return False
    return PRODUCT in read_entries(folder) if any(folder.glob("*.safetensors")) else (folder / PICKLED).is_file()


def read_eagle(folder: Path, target: ModelSpec) -> EagleFolder:
    """Read the config and the tensor headers of an EAGLE head's folder.

    Raises ModelError, which says what is missing, malformed, or does not fit the model.
    """
    check_final_norm(target)
    config = read_json(folder / CONFIG)
    if not any(folder.glob("*.safetensors")) and (folder / PICKLED).is_file():
        raise ModelError(
            f"{folder} has its head as {PICKLED}, which may run code when it is read; save its tensors as"
            " model.safetensors with safetensors.torch.save_file."
        )
    entries = read_entries(folder)
    if _is_third(config, entries):
        raise ModelError(
            f"{folder} has a head of EAGLE-3, which needs the hidden states of three layers of the model, and steps"
            " keep those of the last one; use a head of EAGLE-1, as `tandem train-draft MODEL --kind eagle` makes."
        )
    spec = _spec(folder, config, target)
    vocabulary = _vocabulary(folder, config, entries)
    hidden = spec.hidden_size
    shapes = {name: slot.stored_shape for name, slot in layer_slots(spec, empty_layer(spec)).items()}
    shapes |= {PRODUCT: (hidden, 2 * hidden)}
    if BIAS in entries or config.get("bias") is True:
        shapes[BIAS] = (hidden,)
    extra = entries.keys() - shapes.keys() - {_EMBEDDING, TOKEN_OFFSETS}
    if extra:
        raise ModelError(f"{folder} has tensor {min(extra)}, which a head of EAGLE-1 with its {CONFIG} lacks.")
    tensors = {name: _fitting(folder, name, shape, entries) for name, shape in shapes.items()}
    if vocabulary is not None:
        tensors[TOKEN_OFFSETS] = entries[TOKEN_OFFSETS]
    return EagleFolder(spec, tensors, vocabulary)


def empty_layer(spec: ModelSpec, dtype: torch.dtype = torch.float32, device: torch.device | str = "meta") -> Parameters:
    """Allocate uninitialized weights for the layer, with an embedding and a projection of only one token."""
    return allocate_parameters(replace(spec, vocab_size=1, tied_embeddings=True), dtype, torch.device(device))


def layer_slots(spec: ModelSpec, parameters: Parameters) -> dict[str, ParameterSlot]:
    """Return the slots of the layer's tensors, by their names in the folder."""
    named = {name.removeprefix("model."): slot for name, slot in slots_of(spec, parameters).items()}
    return {name: slot for name, slot in named.items() if name.startswith(_LAYER) and name != _FIRST_NORM}


def _layer_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of a model whose layers have the shape of the head's layer."""
    named = [str(name).replace("Eagle", "") for name in config.get("architectures") or ()]
    return {**config, "architectures": named, "tie_word_embeddings": False}


def _is_third(config: Mapping[str, Any], entries: Mapping[str, TensorEntry]) -> bool:
    named = " ".join(map(str, config.get("architectures") or ())).lower()
    product = entries.get(PRODUCT)
    wide = product is not None and len(product.shape) == 2 and product.shape[1] == 3 * product.shape[0]
    return "eagle3" in named or wide or any(name.startswith("midlayer.") for name in entries)


def _spec(folder: Path, config: Mapping[str, Any], target: ModelSpec) -> ModelSpec:
    with naming_the_file(folder / CONFIG):
        spec = parse_spec(_layer_config(config))
    for field, its, of_target in (
        ("hidden_size", spec.hidden_size, target.hidden_size),
        ("vocab_size", spec.vocab_size, target.vocab_size),
        ("num_hidden_layers", len(spec.layers), 1),
    ):
        if its != of_target:
            asked = "a head of EAGLE-1 has one" if field == "num_hidden_layers" else f"the model's is {of_target}"
            raise ModelError(f"{folder / CONFIG}: {field} is {its}, {asked}; the head is that of another model.")
    layer = spec.layers[0]
    plain = isinstance(layer.attention, GroupedQueryAttention) and isinstance(layer.feed_forward, DenseFeedForward)
    slots = layer_slots(spec, empty_layer(spec)).values()
    norms = layer.output_norms or spec.layer_norms
    if not plain or norms or spec.quantization or any(slot.transform or slot.shape for slot in slots):
        raise ModelError(
            f"{folder / CONFIG}: heads of {spec.architecture} are not supported; supported are layers as Llama's, with"
            " grouped-query attention and a dense feed-forward network that are not quantized."
        )
    # The target's scaling of logits applies to the head's logits too, because both use the same projection.
    return replace(spec, logits_scale=target.logits_scale, logits_softcap=target.logits_softcap)


def _vocabulary(folder: Path, config: Mapping[str, Any], entries: Mapping[str, TensorEntry]) -> int | None:
    entry, size = entries.get(TOKEN_OFFSETS), config.get("draft_vocab_size")
    if entry is None:
        if size not in {None, config.get("vocab_size")}:
            raise ModelError(f"{folder}: draft_vocab_size is {size}, but the tensor {TOKEN_OFFSETS} is missing.")
        return None
    if entry.dtype != "I64" or entry.shape != (size,):
        raise ModelError(f"{folder}: {TOKEN_OFFSETS} is {entry.dtype} {list(entry.shape)}, not I64 [{size}].")
    return entry.shape[0]


def _fitting(folder: Path, name: str, shape: tuple[int, ...], entries: Mapping[str, TensorEntry]) -> TensorEntry:
    entry = entries.get(name)
    if entry is None:
        raise ModelError(f"{folder} lacks tensor {name}, which a head of EAGLE-1 with its {CONFIG} has.")
    if entry.dtype not in FLOATS:
        raise ModelError(f"{folder}: {name} is stored as {entry.dtype}, not in 16 or 32 bits.")
    if entry.shape != shape:
        raise ModelError(f"{folder}: {name} is {list(entry.shape)}, {CONFIG} calls for {list(shape)}.")
    return entry
