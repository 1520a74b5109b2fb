"""One decoder layer in float32, which is run on sample text by the project's own decoder.

Its linear layers, called products, are the stacked q, k and v, the output projection, the stacked gate and up, and
down.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tandem.engine.cache.paged_cache import kernel_view
from tandem.engine.config.kv import KvGroup, kv_groups
from tandem.engine.config.model import DenseFeedForward, GroupedQueryAttention, ModelSpec
from tandem.engine.config.state_layers import StateLayer
from tandem.engine.kernels.base import StepLayout
from tandem.engine.kernels.kv_cache import KvCache
from tandem.engine.kernels.packed_weight import Weight
from tandem.engine.models.allocation import allocate_parameters
from tandem.engine.models.decoder import DecoderModel
from tandem.engine.models.families import slots_of
from tandem.engine.models.parameters import AttentionParameters, DenseParameters
from tandem.engine.quantizer.calibration import CalibrationKernels, InputStatistics
from tandem.engine.quantizer.codes import QuantizedWeight
from tandem.engine.quantizer.source import Source
from tandem.protocol.errors import ModelError


@dataclass(frozen=True, slots=True)
class Product:
    """The weight of a linear layer, which may stack several weights of the checkpoint: q, k and v, or gate and up."""

    weight: Tensor
    """The weight, [N, K] float32; modified in place."""
    parts: dict[str, slice]
    """The rows of each weight of the checkpoint, by the name of its tensor."""


class CalibratedLayer:
    """Owns the weights of a decoder layer with grouped-query attention and a dense feed-forward network."""

    def __init__(self, source: Source, number: int, kernels: CalibrationKernels, device: torch.device) -> None:
        spec = source.spec
        self.spec = replace(spec, layers=(spec.layers[number],), vocab_size=1, tied_embeddings=True)
        parameters = allocate_parameters(self.spec, torch.float32, device)
        (layer,) = parameters.layers
        assert isinstance(layer.attention, AttentionParameters)
        assert isinstance(layer.feed_forward, DenseParameters)
        self.weights, self.attention, self.feed_forward = layer, layer.attention, layer.feed_forward
        self.qkv, self.output = _plain(layer.attention.qkv), _plain(layer.attention.output)
        self.gate_up, self.down = _plain(layer.feed_forward.gate_up), _plain(layer.feed_forward.down)
        prefix, own = f"model.layers.{number}.", "model.layers.0."
        slots = slots_of(self.spec, parameters).items()
        self._slots = {prefix + name.removeprefix(own): slot for name, slot in slots if name.startswith(own)}
        for name, slot in self._slots.items():
            stored = source.read(name).to(device).float()
            _plain(slot.tensor).copy_(stored if slot.transform is None else slot.transform(stored))
        self._model = DecoderModel(self.spec, parameters, kernels, spec.max_context)
        self._kernels = kernels

    def run(self, hidden: Sequence[Tensor]) -> None:
        """Add the outputs of the layer to the hidden states [T, hidden size] float32 of each sample, in place."""
        for sample in hidden:
            layout, cache = _whole(self.spec, len(sample), sample.device)
            self._model.run_layer(0, sample, (layout,), (cache,))

    def statistics(self, hidden: Sequence[Tensor]) -> dict[int, InputStatistics]:
        """Return the input statistics of each linear layer, by the address of its weight; `hidden` is not changed."""
        self._kernels.statistics = {
            product.weight.data_ptr(): InputStatistics.zero(product.weight.shape[1], product.weight.device)
            for product in self.products()
        }
        for sample in hidden:
            self.run([sample.clone()])
        collected, self._kernels.statistics = self._kernels.statistics, {}
        return collected

    def products(self) -> Iterator[Product]:
        """Yield the weights of the linear layers in the order in which they are computed."""
        for weight in (self.qkv, self.output, self.gate_up, self.down):
            parts = {}
            for name, slot in self._slots.items():
                part = _plain(slot.tensor)
                if _inside(part, weight):
                    first = (part.data_ptr() - weight.data_ptr()) // (weight.shape[1] * weight.itemsize)
                    parts[name] = slice(first, first + len(part))
            yield Product(weight, parts)

    def others(self) -> dict[str, Tensor]:
        """Return the tensors that are not weights of linear layers, with their current values in float32.

        The keys are the names in the checkpoint.
        """
        quantized = {name for product in self.products() for name in product.parts}
        return {name: _plain(slot.tensor) for name, slot in self._slots.items() if name not in quantized}


def store(product: Product, quantized: QuantizedWeight) -> dict[str, QuantizedWeight]:
    """Set a linear layer's weight to its quantized values, and return the codes by the checkpoint's tensor names."""
    product.weight.copy_(quantized.values())
    return {name: quantized.rows(rows.start, rows.stop - rows.start) for name, rows in product.parts.items()}


def check_calibrated(spec: ModelSpec, source: Source) -> None:
    """Raise ModelError if `CalibratedLayer` does not support the model's layers."""
    if what := _unsupported(spec):
        raise ModelError(
            f"{source.folder} ({spec.architecture}) has {what}, for which there is no calibration; use --method rtn."
        )
    slots = slots_of(spec, allocate_parameters(spec, torch.float32, torch.device("meta")))
    changed = sorted(name for name, slot in slots.items() if slot.transform is not None and "layers." in name)
    # The values of such a layer could not be written under their names.
    if changed:
        raise ModelError(
            f"{source.folder} ({spec.architecture}) stores {changed[0]} in another form than layers compute with, for"
            " which there is no calibration; use --method rtn."
        )


def _unsupported(spec: ModelSpec) -> str:
    """Return the part of the model that `CalibratedLayer` does not support; "" if it supports all layers."""
    for layer in spec.layers:
        gated = isinstance(layer.attention, GroupedQueryAttention) and layer.attention.output_gate
        if gated or isinstance(layer.attention, StateLayer):
            return "state layers and attention with an output gate"
        if not isinstance(layer.attention, GroupedQueryAttention) or not isinstance(
            layer.feed_forward, DenseFeedForward
        ):
            return "experts"
        if not layer.feed_forward.gated:
            return "feed-forward networks without a gate"
        if not layer.input_norms:
            return "layers whose inputs are not normalized"
    if spec.wide_norms:
        return "norms that are stored minus 1"
    return "LayerNorm" if spec.layer_norms else ""


def embedded(source: Source, samples: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    """Return the embeddings of samples: hidden states [T, hidden size] float32, before the first layer."""
    table = source.read("model.embed_tokens.weight")
    scale = torch.tensor(source.spec.embedding_scale, dtype=table.dtype).item()
    return [table[torch.tensor(sample)].to(device).float() * scale for sample in samples]


def _whole(spec: ModelSpec, tokens: int, device: torch.device) -> tuple[StepLayout, KvCache]:
    """Return the layout of a single row of `tokens` tokens, and a KV cache of one page that holds them."""
    (group,) = kv_groups(spec)
    assert isinstance(group, KvGroup)
    positions = torch.arange(tokens, dtype=torch.int32, device=device)
    layout = StepLayout(
        positions=positions,
        slots=positions.long(),
        row_starts=torch.tensor([0, tokens], dtype=torch.int32, device=device),
        context_lens=torch.tensor([tokens], dtype=torch.int32, device=device),
        page_table=torch.zeros(1, 1, dtype=torch.int32, device=device),
        max_row_tokens=tokens,
        max_context=tokens,
    )
    return layout, kernel_view(torch.empty(1, tokens * group.elements, device=device), group, tokens)


def _plain(weight: Weight) -> Tensor:
    assert isinstance(weight, Tensor)
    return weight


def _inside(part: Tensor, whole: Tensor) -> bool:
    return whole.data_ptr() <= part.data_ptr() < whole.data_ptr() + whole.nbytes
