"""The kinds of attention and feed-forward network that a layer may have, with weights prepared for the kernels."""

import torch
from torch import Tensor

from tandem.engine.config.model import DenseFeedForward, GroupedQueryAttention, LatentAttention, MixtureOfExperts
from tandem.engine.kernels.base import Kernels, Products, StepLayout
from tandem.engine.kernels.kv_cache import KvCache, unquantized
from tandem.engine.kernels.layers import (
    AttentionLayer,
    DenseLayer,
    Experts,
    ExpertsLayer,
    LatentLayer,
    Linear,
    Norm,
)
from tandem.engine.models.parameters import AttentionParameters, DenseParameters, LatentParameters


class AttentionBlock:
    """Grouped-query attention of one layer."""

    def __init__(
        self,
        spec: GroupedQueryAttention,
        index: int,
        norm: Norm,
        weights: AttentionParameters,
        *,
        rope: Tensor,
        query_factors: Tensor | None,
        kernels: Kernels,
        products: Products,
    ) -> None:
        """Prepare the weights for the kernels.

        `rope` is the table of `AttentionLayer.rope`, `index` the layer's index in the KV cache. `query_factors`
        [max_context] are those of `GroupedQueryAttention.query_scaling`, or None.
        """
        self.output = products.prepare(Linear(weights.output, weights.output_bias))
        self._norm, self._kernels, self._products = norm, kernels, products
        self._query_factors = query_factors
        self._qkv = products.prepare(Linear(weights.qkv, weights.qkv_bias))
        q_norm, k_norm = weights.q_norm, weights.k_norm
        self._query_weight: Tensor | None = None
        if spec.norm_after_rope and q_norm is not None and k_norm is not None:
            # Rotation keeps the length of a vector, so only the weights must be applied after it: those of both norms
            # to the queries, as a score is a sum of products of their elements and the keys'.
            self._query_weight = q_norm.float() * k_norm.float()
            q_norm = k_norm = torch.ones_like(q_norm)
        self._layer = AttentionLayer(index, spec.shape, rope, q_norm, k_norm, norm.eps, weights.sinks)

    def store(self, hidden: Tensor, layout: StepLayout, cache: KvCache) -> Tensor:
        """Store the keys and values of the step's tokens in `cache`, and return the queries."""
        return self._store(self._products.norm_linear(hidden, self._norm, self._qkv), layout, cache)

    def _store(self, qkv: Tensor, layout: StepLayout, cache: KvCache) -> Tensor:
        q = self._kernels.rope_and_store(qkv, self._layer, cache, layout)
        if self._query_weight is not None:
            q *= self._query_weight
        return _scaled(q, self._query_factors, layout)

    def attend(self, q: Tensor, layout: StepLayout, cache: KvCache) -> Tensor:
        """Return the output [T, heads·head_dim] of the attention heads, before the output projection."""
        return self._kernels.attention(q, self._layer, cache, layout)


class LatentBlock:
    """Latent attention (MLA) of one layer."""

    def __init__(
        self,
        spec: LatentAttention,
        index: int,
        norm: Norm,
        weights: LatentParameters,
        *,
        rope: Tensor,
        query_factors: Tensor | None,
        kernels: Kernels,
        products: Products,
    ) -> None:
        """Prepare the weights for the kernels.

        `rope` is the table of `LatentLayer.rope`, `index` the layer's index in the KV cache. `query_factors`
        [max_context] are those of `LatentAttention.query_scaling`, or None.
        """
        self.output = products.prepare(Linear(weights.output, weights.output_bias))
        self._norm, self._kernels, self._products = norm, kernels, products
        self._query_factors = query_factors
        self._down = products.prepare(Linear(weights.down, weights.down_bias))
        self._query_up = None if weights.query_up is None else products.prepare(Linear(weights.query_up))
        self._query_norm = None if weights.query_norm is None else Norm(weights.query_norm, spec.norm_eps)
        self._layer = LatentLayer(index, spec.shape, rope, Norm(weights.latent_norm, spec.norm_eps), weights.kv_up)

    def store(self, hidden: Tensor, layout: StepLayout, cache: KvCache) -> Tensor:
        """Store the latents of the step's tokens in `cache`, and return the rotated queries [T, heads, nope + rope]."""
        cached = self._layer.shape.cached
        down = self._products.norm_linear(hidden, self._norm, self._down)
        q, latents = down[:, :-cached], down[:, -cached:]
        if self._query_up is not None and self._query_norm is not None:
            q = self._products.norm_linear(q.contiguous(), self._query_norm, self._query_up)
        q = self._kernels.latent_store(q, latents, self._layer, unquantized(cache), layout)
        return _scaled(q, self._query_factors, layout)

    def attend(self, q: Tensor, layout: StepLayout, cache: KvCache) -> Tensor:
        """Return the output [T, heads·v_dim] of the attention heads, before the output projection."""
        return self._kernels.latent_attention(q, self._layer, unquantized(cache), layout)


class DenseBlock:
    """The dense feed-forward network of one layer."""

    def __init__(
        self, spec: DenseFeedForward, norm: Norm, weights: DenseParameters, *, kernels: Kernels, products: Products
    ) -> None:
        self._kernels, self._products = kernels, products
        gate_up = products.prepare(Linear(weights.gate_up, weights.gate_up_bias))
        down = products.prepare(Linear(weights.down, weights.down_bias))
        self._layer = DenseLayer(norm, gate_up, down, spec.activation)

    def add(self, hidden: Tensor, slots: Tensor, output_norm: Norm | None) -> None:
        """Add the network's output to `hidden` in place; if `output_norm` is given, the output is normalized first."""
        layer, products = self._layer, self._products
        if output_norm is None:
            products.feed_forward(hidden, layer)
        else:
            active = products.norm_gate_up(hidden, layer.norm, layer.gate_up, layer.activation)
            self._kernels.norm_add(products.linear(active, layer.down), output_norm, hidden)


class ExpertsBlock:
    """The mixture of experts of one layer."""

    def __init__(
        self, spec: MixtureOfExperts, norm: Norm, weights: Experts, *, kernels: Kernels, products: Products
    ) -> None:
        self._products = products
        self._layer = ExpertsLayer(norm, kernels.prepare_experts(weights), spec)

    def add(self, hidden: Tensor, slots: Tensor, output_norm: Norm | None) -> None:
        """Add the output of the experts to `hidden` in place.

        Tokens whose slot is -1 are padding, for which no expert is computed.
        """
        assert output_norm is None
        self._products.experts(hidden, self._layer, slots, hidden)


def _scaled(q: Tensor, factors: Tensor | None, layout: StepLayout) -> Tensor:
    """Multiply the queries [T, heads, any] by the factor of each token's position in place, if there are factors."""
    if factors is not None:
        q *= factors[layout.positions.long()].to(q.dtype)[:, None, None]
    return q
