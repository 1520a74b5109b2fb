"""Embeddings of tokens that each layer has for itself (Gemma 3n and Gemma 4, `ModelSpec.layer_embedding`)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.engine.config.model import ModelSpec
from tandem.engine.kernels.base import DeferredTokens, Kernels
from tandem.engine.kernels.layers import Linear, Norm
from tandem.engine.kernels.packed_weight import Weight
from tandem.engine.kernels.reference import rms_norm
from tandem.engine.models.parameters import EmbeddingParameters, LayerEmbeddingParameters


def embedded(
    kernels: Kernels, table: Weight, token_ids: Tensor, feed: DeferredTokens | None, dtype: torch.dtype
) -> Tensor:
    """Return the rows of `table` for the tokens of a step → [T, columns] of `dtype`."""
    if isinstance(table, Tensor):
        return kernels.embed(token_ids, table, feed)
    # A step needs few rows of the table, so they are dequantized here, and the kernels do not have to support packed
    # tables.
    if feed is not None:
        token_ids = feed.tokens(token_ids)
    return table.rows(token_ids).dequantized(dtype)


class LayerEmbeddings:
    """Computes the embeddings of all layers at the beginning of a step."""

    def __init__(
        self, spec: ModelSpec, weights: LayerEmbeddingParameters, dtype: torch.dtype, kernels: Kernels
    ) -> None:
        """Prepare the weights for the kernels; `dtype` is that of the activations."""
        self._kernels, self._dtype = kernels, dtype
        self._table, self._norm = weights.table, Norm(weights.norm, spec.norm_eps)
        self._projection = kernels.prepare(Linear(weights.projection))
        self._size = spec.layer_embedding
        # Rounded to the model's dtype before the product, as transformers does.
        self._scale = torch.tensor(self._size**0.5, dtype=dtype).item()
        self._projection_scale = spec.hidden_size**-0.5

    def __call__(self, token_ids: Tensor, hidden: Tensor, feed: DeferredTokens | None) -> Tensor:
        """Return the embeddings [T, layers, size] of a step; `hidden` [T, H] are the states before the first layer."""
        own = embedded(self._kernels, self._table, token_ids, feed, self._dtype) * self._scale
        projected = self._kernels.linear(hidden, self._projection) * self._projection_scale
        shape = (len(hidden), -1, self._size)
        normed = rms_norm(projected.view(shape), self._norm.weight, self._norm.eps)
        both: Tensor = (normed + own.view(shape)) * 0.5**0.5
        return both


class EmbeddingBlock:
    """Adds a layer's own embedding to the hidden states."""

    def __init__(self, weights: EmbeddingParameters, norm_eps: float, kernels: Kernels) -> None:
        """Prepare the weights for the kernels."""
        self._kernels, self._norm = kernels, Norm(weights.norm, norm_eps)
        self._gate, self._output = (kernels.prepare(Linear(weight)) for weight in (weights.gate, weights.output))

    def add(self, hidden: Tensor, embedding: Tensor) -> None:
        """Add norm(output · (gelu(gate · hidden) · embedding)) to `hidden` [T, H] in place; embedding [T, size]."""
        gated = F.gelu(self._kernels.linear(hidden, self._gate), approximate="tanh") * embedding
        self._kernels.norm_add(self._kernels.linear(gated, self._output), self._norm, hidden)
