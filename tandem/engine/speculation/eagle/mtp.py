"""The multi-token prediction (MTP) layer of a checkpoint (arXiv 2412.19437), which `--speculate mtp` proposes with.

The layer is a decoder layer like the last one of the model that has attention, with an indexer if attention is sparse
(GLM-5's layers may share the choice of an earlier one; its MTP layer has its own). It uses the embedding and the output
layer of the model, and predicts several tokens by running again on its own hidden states. Of a checkpoint with several
MTP layers, the first is used.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from tandem.engine.config.model import LatentAttention, LayerSpec, ModelSpec
from tandem.engine.config.quantization import WeightScheme
from tandem.engine.config.state_layers import StateLayer
from tandem.engine.models.allocation import allocate_parameters, empty_on, parameter_bytes, quantized_weights
from tandem.engine.models.families import family_of, slots_of
from tandem.engine.models.load_spec import read_json
from tandem.engine.models.mtp_layout import MtpLayout
from tandem.engine.models.parameters import Parameters
from tandem.engine.models.slots import ParameterSlot
from tandem.engine.speculation.heads.folder import CONFIG, check_final_norm
from tandem.engine.weights.checkpoint import (
    TensorNames,
    as_stored,
    match_entries,
    read_entries,
    read_slots,
    separates_experts,
)
from tandem.engine.weights.random_weights import fill_randomly
from tandem.engine.weights.safetensors_file import TensorEntry
from tandem.protocol.errors import ModelError

_META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class MtpParameters:
    """The weights of an MTP layer, without the model's embedding and output layer. H is the hidden size."""

    decoder: Parameters
    """The decoder layer, and the norm before the output layer as `final_norm`; the ends have no rows."""
    projection: Tensor
    """[H, 2·H]: computes the input of the decoder layer."""
    embedding_norm: Tensor
    state_norm: Tensor


@dataclass(frozen=True, slots=True)
class MtpLayer:
    """The description of the MTP layer of a model, from the model's spec alone."""

    target: ModelSpec
    """The spec of the whole model."""
    layout: MtpLayout
    folder: Path | None
    """The checkpoint of the model; None = random weights."""
    target_layers: tuple[int, ...] = ()
    """Empty: the layer reads the output of the model's last layer."""

    @classmethod
    def of(cls, target: ModelSpec, folder: Path | None) -> "MtpLayer":
        """Return the description of a model's MTP layer; raises ModelError if its family has none that is supported.

        `folder` is the checkpoint of the model; None = random weights.
        """
        architecture = target.architecture
        layout = family_of({"architectures": [architecture]}).mtp
        if layout is None:
            raise ModelError(
                f"{architecture} has no multi-token prediction layer that is supported; use --speculate ngram, or draft"
                " with --draft."
            )
        return cls(target, layout, folder)

    @property
    def spec(self) -> ModelSpec:
        """The spec of a model with the MTP layer alone."""
        return replace(self.target, layers=(self._layer,), page_layers=())

    @property
    def _layer(self) -> LayerSpec:
        return next(layer for layer in reversed(self.target.layers) if not _needs_others(layer))

    @property
    def _extended(self) -> ModelSpec:
        """The model with the MTP layer after its own layers, because the quantization depends on a layer's number."""
        return replace(self.target, layers=(*self.target.layers, self._layer), page_layers=())

    def memory_bytes(self, dtype: torch.dtype, *, on_cpu: bool) -> int:
        """Return the bytes of the weights that the layer does not share with the model, which has the dtype `dtype`."""
        weights = self._allocate(self._extended, dtype, _META)
        own = (weights.projection, weights.embedding_norm, weights.state_norm)
        return parameter_bytes(weights.decoder, on_cpu=on_cpu) + sum(tensor.nbytes for tensor in own)

    def check(self) -> None:
        """Check the headers of the checkpoint, without reading weights.

        Raises ModelError if the checkpoint has no MTP layer, or one that is not supported.
        """
        check_final_norm(self.target)
        if self.folder is not None:
            self._matched(self.folder, torch.float32, _META)

    def load(self, dtype: torch.dtype, device: torch.device) -> MtpParameters:
        """Read the weights, or fill them randomly. Raises ModelError as `check` does."""
        check_final_norm(self.target)
        if self.folder is not None:
            weights, slots, schemes, entries = self._matched(self.folder, dtype, device)
            read_slots(slots, schemes, entries)
            return weights
        weights = self._allocate(self._extended, dtype, device)
        fill_randomly(weights.decoder)
        weights.projection.normal_(0.0, self.target.hidden_size**-0.5)
        weights.embedding_norm.fill_(1.0)
        weights.state_norm.fill_(1.0)
        return weights

    def _allocate(self, extended: ModelSpec, dtype: torch.dtype, device: torch.device) -> MtpParameters:
        whole, hidden = allocate_parameters(extended, dtype, _META), extended.hidden_size
        layer, norm = empty_on(device, (whole.layers[-1], whole.final_norm))
        ends = torch.empty(0, hidden, dtype=dtype, device=device)
        return MtpParameters(
            Parameters(dtype, ends, ends, norm, (layer,)),
            torch.empty(hidden, 2 * hidden, dtype=dtype, device=device),
            empty_on(device, norm),
            empty_on(device, norm),
        )

    def _matched(
        self, folder: Path, dtype: torch.dtype, device: torch.device
    ) -> tuple[MtpParameters, dict[str, ParameterSlot], Mapping[str, WeightScheme], dict[str, TensorEntry]]:
        """Return empty weights, and the slots, the quantization schemes and the entries of the layer's tensors."""
        found = self._entries(folder)
        spec = replace(self._extended, separate_experts=separates_experts(found))
        if spec.quantization is not None:
            slots = self._slots(spec, self._allocate(spec, dtype, _META))
            plain = as_stored(spec.quantization, slots, quantized_weights(spec), found)
            spec = replace(spec, quantization=plain)
        weights = self._allocate(spec, dtype, device)
        slots = self._slots(spec, weights)
        entries = match_entries(folder, slots, TensorNames(spec, multimodal=False, predicting_layers=0), found)
        return weights, slots, quantized_weights(spec).schemes, entries

    def _slots(self, spec: ModelSpec, weights: MtpParameters) -> dict[str, ParameterSlot]:
        """Return the slots of the layer's tensors; the decoder layer has the names of the model's layers."""
        whole = allocate_parameters(spec, weights.decoder.dtype, _META)
        placed = replace(whole, layers=(*whole.layers[:-1], *weights.decoder.layers))
        slots = {name: slot for name, slot in slots_of(spec, placed).items() if name.startswith(self._prefix)}
        # Checkpoints that store the weights of the layers' norms minus 1 also store those of these norms so.
        transform = slots[f"{self._prefix}input_layernorm.weight"].transform
        norms = weights.embedding_norm, weights.state_norm, weights.decoder.final_norm
        projection, *names = self._own_names
        return slots | {
            projection: ParameterSlot(weights.projection),
            **{name: ParameterSlot(norm, transform) for name, norm in zip(names, norms, strict=True)},
        }

    def _entries(self, folder: Path) -> dict[str, TensorEntry]:
        """Return the entries of the layer's tensors, by the names of `_slots`."""
        entries = read_entries(folder)
        entries |= TensorNames.of(self.target, read_json(folder / CONFIG)).text_model(entries)
        if self._own_names[0] not in entries:
            raise ModelError(
                f"{folder} has no multi-token prediction layer (tensor {self._own_names[0]}); use a checkpoint that has"
                " it, or --speculate ngram."
            )
        prefix, copies = self._named(self.layout.prefix), {self._named(name) for name in self.layout.copies}
        layer = {
            self._prefix + name.removeprefix(prefix): entry
            for name, entry in entries.items()
            if name.startswith(prefix) and name not in {*copies, *self._own_names}
        }
        return layer | {name: entries[name] for name in self._own_names if name in entries}

    @property
    def _own_names(self) -> tuple[str, ...]:
        """The names of the projection, and of the norms of embeddings, states and outputs."""
        layout = self.layout
        names = layout.projection, layout.embedding_norm, layout.state_norm, layout.output_norm
        return tuple(map(self._named, names))

    @property
    def _prefix(self) -> str:
        """The prefix of the decoder layer's tensors in `_slots`."""
        return f"model.layers.{len(self.target.layers)}."

    def _named(self, name: str) -> str:
        return name.format(layer=len(self.target.layers))


def _needs_others(layer: LayerSpec) -> bool:
    """Return True if a layer keeps a state, or attends to the tokens that another layer has chosen."""
    attention = layer.attention
    return isinstance(attention, StateLayer) or (isinstance(attention, LatentAttention) and attention.shares_choice)
