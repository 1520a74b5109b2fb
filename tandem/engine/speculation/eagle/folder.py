"""Reads an EAGLE head's folder, in the layout of published checkpoints (https://github.com/SafeAILab/EAGLE).

config.json is that of a model with one layer, whose weights have their usual names after `layers.0.`, or `midlayer.`.
The embedding is that of the target model, so `embed_tokens.weight`, a copy of it, is not read. `d2t`
[`draft_vocab_size`] int64 limits the tokens that the head can predict: its output n is the token n + d2t[n].

EAGLE-1: `fc.weight` [H, 2·H], and `fc.bias` [H] if present, compute the input of the layer from the embedding of a
token and the hidden state that the token was sampled from. The layer has no `input_layernorm`; the output projection is
that of the target model.

EAGLE-3: `fc.weight` [H, 3·H] computes a state from the hidden states before three layers of the target model. Attention
reads the embedding after `input_layernorm` and the state after `hidden_norm`, so q, k and v have 2·H columns.
`norm.weight` and `lm_head.weight` [`draft_vocab_size`, H] compute the logits; without `d2t`, `lm_head.weight` may be
missing, and the output projection is the target's. The target's layers are 2, ⌊L/2⌋ and L - 3 of L, or
`eagle_aux_hidden_state_layer_ids`: at the top level of config.json those are the layers before which the states are
taken (vLLM, speculators), within `eagle_config` the layers after which they are taken (SGLang, SpecForge).
"""

import re
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
from tandem.engine.models.parameters import AttentionParameters, Parameters
from tandem.engine.models.slots import ParameterSlot
from tandem.engine.speculation.heads.folder import CONFIG, check_final_norm
from tandem.engine.weights.checkpoint import read_entries
from tandem.engine.weights.safetensors_file import TensorEntry
from tandem.engine.weights.tensor_reader import FLOATS
from tandem.protocol.errors import ModelError

PICKLED = "pytorch_model.bin"
PRODUCT, BIAS, TOKEN_OFFSETS = "fc.weight", "fc.bias", "d2t"
PROJECTION, OUTPUT_NORM = "lm_head.weight", "norm.weight"
_LAYER = "layers.0."
EMBEDDING_NORM, STATE_NORM = f"{_LAYER}input_layernorm.weight", f"{_LAYER}hidden_norm.weight"
_UNREAD = {"embed_tokens.weight", "t2d"}
_MIDLAYER = "midlayer."
_TARGET_LAYERS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True)
class EagleFolder:
    """The description of an EAGLE head on disk: its spec and its tensors."""

    folder: Path
    spec: ModelSpec
    """The spec of a model with the head's one layer and the target's vocabulary."""
    entries: Mapping[str, TensorEntry]
    """The tensors that the head is read from, by name."""
    vocabulary: int | None
    """The number of tokens that the head can predict; None = the model's whole vocabulary."""
    target_layers: tuple[int, ...] = ()
    """The layers of the target model before which an EAGLE-3 head takes hidden states; empty for EAGLE-1."""
    norm_before_residual: bool = False
    """True if the residual stream of an EAGLE-3 head begins with the normalized state."""

    @property
    def own_projection(self) -> bool:
        """True if the head does not use the output projection of the target model."""
        return PROJECTION in self.entries

    def memory_bytes(self, dtype: torch.dtype, *, on_cpu: bool) -> int:
        """Return the bytes of the head's own weights in `dtype`, which it does not share with the model."""
        del on_cpu  # no weight is packed
        sizes = {name: prod(entry.shape) for name, entry in self.entries.items()}
        offsets = sizes.pop(TOKEN_OFFSETS, 0)
        copied = 0 if self.own_projection else offsets * self.spec.hidden_size
        return (sum(sizes.values()) + copied) * dtype.itemsize + offsets * torch.int64.itemsize


def is_eagle(folder: Path, config: Mapping[str, Any]) -> bool:
    """Return True if the folder with this config.json contains an EAGLE head, in any layout."""
    if "eagle" in _names(config):
        return is_supported(_layer_config(config))
    if config.get("num_hidden_layers") != 1:
        return False
    return PRODUCT in read_entries(folder) if any(folder.glob("*.safetensors")) else (folder / PICKLED).is_file()


def read_eagle(folder: Path, target: ModelSpec) -> EagleFolder:
    """Read the config and the tensor headers of an EAGLE head's folder.

    Raises ModelError, which says what is missing, malformed, or does not fit the model.
    """
    config = read_json(folder / CONFIG)
    if not any(folder.glob("*.safetensors")) and (folder / PICKLED).is_file():
        raise ModelError(
            f"{folder} has its head as {PICKLED}, which may run code when it is read; save its tensors as"
            " model.safetensors with safetensors.torch.save_file."
        )
    entries = {name.replace(_MIDLAYER, _LAYER): entry for name, entry in read_entries(folder).items()}
    layers = _target_layers(folder, config, target) if _is_third(config, entries) else ()
    if not layers:
        check_final_norm(target)
    spec = _spec(folder, config, target, own_projection=PROJECTION in entries)
    vocabulary = _vocabulary(folder, config, entries)
    form = f"a head of EAGLE-{3 if layers else 1} with its {CONFIG}"
    shapes = _shapes(spec, config, entries, layers, vocabulary)
    extra = entries.keys() - shapes.keys() - _UNREAD - {TOKEN_OFFSETS}
    if extra:
        raise ModelError(f"{folder} has tensor {min(extra)}, which {form} lacks.")
    tensors = {name: _fitting(folder, name, shape, entries, form) for name, shape in shapes.items()}
    if vocabulary is not None:
        tensors[TOKEN_OFFSETS] = entries[TOKEN_OFFSETS]
    # Heads of speculators have the norm before the residual stream unless their config says otherwise.
    before = bool(config.get("norm_before_residual", "transformer_layer_config" in config))
    return EagleFolder(folder, spec, tensors, vocabulary, layers, before)


def empty_layer(
    spec: ModelSpec, dtype: torch.dtype = torch.float32, device: torch.device | str = "meta", *, third: bool = False
) -> Parameters:
    """Allocate uninitialized weights for the layer, with an embedding and a projection of only one token.

    The layer of a `third` EAGLE head has q, k and v of 2·H columns.
    """
    parameters = allocate_parameters(replace(spec, vocab_size=1, tied_embeddings=True), dtype, torch.device(device))
    (layer,) = parameters.layers
    attention = None
    if third:
        assert isinstance(layer.attention, AttentionParameters)
        rows, columns = layer.attention.qkv.shape
        attention = replace(layer.attention, qkv=torch.empty(rows, 2 * columns, dtype=dtype, device=device))
    # The input of attention is normalized already.
    return replace(parameters, layers=(replace(layer, input_norm=None, attention=attention or layer.attention),))


def layer_slots(spec: ModelSpec, parameters: Parameters) -> dict[str, ParameterSlot]:
    """Return the slots of the layer's tensors, by their names in the folder."""
    named = {name.removeprefix("model."): slot for name, slot in slots_of(spec, parameters).items()}
    return {name: slot for name, slot in named.items() if name.startswith(_LAYER)}


def _names(config: Mapping[str, Any]) -> str:
    """Return the names of the architectures, in lower case."""
    return " ".join(map(str, config.get("architectures") or ())).lower()


def _layer_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of a model whose layers have the shape of the head's layer."""
    layer = config.get("transformer_layer_config")
    if isinstance(layer, dict):  # a head of speculators
        return {**layer, "architectures": [], "tie_word_embeddings": False, "num_hidden_layers": 1}
    named = [re.sub("Eagle3?", "", str(name)) for name in config.get("architectures") or ()]
    return {**config, "architectures": named, "tie_word_embeddings": False}


def _is_third(config: Mapping[str, Any], entries: Mapping[str, TensorEntry]) -> bool:
    return "eagle3" in _names(config) or STATE_NORM in entries


def _target_layers(folder: Path, config: Mapping[str, Any], target: ModelSpec) -> tuple[int, ...]:
    """Return the numbers of the target's layers before which an EAGLE-3 head takes the hidden states."""
    after, last = config.get("eagle_config") or {}, len(target.layers)
    if not isinstance(after, dict):
        raise ModelError(f"{folder / CONFIG}: eagle_config is {after!r}, not an object.")
    if after.get("use_aux_hidden_state") is False:
        raise ModelError(
            f"{folder / CONFIG}: use_aux_hidden_state is false; supported are heads of EAGLE-3 that read the hidden"
            " states of several layers."
        )
    outer, inner = config.get(_TARGET_LAYERS) or [], after.get(_TARGET_LAYERS) or []
    if not all(isinstance(numbers, list) and {type(n) for n in numbers} <= {int} for numbers in (outer, inner)):
        raise ModelError(f"{folder / CONFIG}: {_TARGET_LAYERS} is {outer or inner}, not a list of layer numbers.")
    layers = tuple(outer or [number + 1 for number in inner] or (2, last // 2, last - 3))
    if len(set(layers)) != len(layers) or not all(1 <= number < last for number in layers):
        raise ModelError(
            f"{folder / CONFIG}: the head takes the hidden states before layers {list(layers)}, which must be different"
            f" and from 1 to {last - 1} in a model of {last} layers; the head is that of another model."
        )
    return layers


def _shapes(
    spec: ModelSpec,
    config: Mapping[str, Any],
    entries: Mapping[str, TensorEntry],
    target_layers: tuple[int, ...],
    vocabulary: int | None,
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a head except `d2t`, by name."""
    hidden, third = spec.hidden_size, bool(target_layers)
    slots = layer_slots(spec, empty_layer(spec, third=third))
    shapes = {name: slot.stored_shape for name, slot in slots.items()}
    if third:
        shapes |= {PRODUCT: (hidden, len(target_layers) * hidden)}
        shapes |= dict.fromkeys((EMBEDDING_NORM, STATE_NORM, OUTPUT_NORM), (hidden,))
        if PROJECTION in entries or vocabulary is not None:
            shapes[PROJECTION] = (vocabulary or spec.vocab_size, hidden)
        return shapes
    shapes[PRODUCT] = (hidden, 2 * hidden)
    if BIAS in entries or config.get("bias") is True:
        shapes[BIAS] = (hidden,)
    return shapes


def _spec(folder: Path, config: Mapping[str, Any], target: ModelSpec, *, own_projection: bool) -> ModelSpec:
    with naming_the_file(folder / CONFIG):
        spec = parse_spec(_layer_config(config))
    for field, its, of_target in (
        ("hidden_size", spec.hidden_size, target.hidden_size),
        ("target_hidden_size", config.get("target_hidden_size") or target.hidden_size, target.hidden_size),
        ("vocab_size", spec.vocab_size, target.vocab_size),
        ("num_hidden_layers", len(spec.layers), 1),
    ):
        if its != of_target:
            asked = "an EAGLE head has one" if field == "num_hidden_layers" else f"the model's is {of_target}"
            raise ModelError(f"{folder / CONFIG}: {field} is {its}, {asked}; the head is that of another model.")
    layer = spec.layers[0]
    plain = isinstance(layer.attention, GroupedQueryAttention) and isinstance(layer.feed_forward, DenseFeedForward)
    slots = layer_slots(spec, empty_layer(spec)).values() if plain else ()
    norms = layer.output_norms or spec.layer_norms
    if not plain or norms or spec.quantization or any(slot.transform or slot.shape for slot in slots):
        raise ModelError(
            f"{folder / CONFIG}: heads of {spec.architecture} are not supported; supported are layers as Llama's, with"
            " grouped-query attention and a dense feed-forward network that are not quantized."
        )
    if own_projection:
        return spec
    # The target's scaling of logits applies to the head's logits too, because both use the same projection.
    return replace(spec, logits_scale=target.logits_scale, logits_softcap=target.logits_softcap)


def _vocabulary(folder: Path, config: Mapping[str, Any], entries: Mapping[str, TensorEntry]) -> int | None:
    entry, size = entries.get(TOKEN_OFFSETS), config.get("draft_vocab_size")
    if entry is None:
        if size not in {None, _layer_config(config).get("vocab_size")}:
            raise ModelError(f"{folder}: draft_vocab_size is {size}, but the tensor {TOKEN_OFFSETS} is missing.")
        return None
    if entry.dtype != "I64" or entry.shape != (size,):
        raise ModelError(f"{folder}: {TOKEN_OFFSETS} is {entry.dtype} {list(entry.shape)}, not I64 [{size}].")
    return entry.shape[0]


def _fitting(
    folder: Path, name: str, shape: tuple[int, ...], entries: Mapping[str, TensorEntry], form: str
) -> TensorEntry:
    entry = entries.get(name)
    if entry is None:
        raise ModelError(f"{folder} lacks tensor {name}, which {form} has.")
    if entry.dtype not in FLOATS:
        raise ModelError(f"{folder}: {name} is stored as {entry.dtype}, not in 16 or 32 bits.")
    if entry.shape != shape:
        raise ModelError(f"{folder}: {name} is {list(entry.shape)}, {CONFIG} calls for {list(shape)}.")
    return entry
