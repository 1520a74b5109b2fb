"""The kinds of attention that a layer may have, with weights prepared for the kernels."""

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.engine.config.model import GroupedQueryAttention, LatentAttention
from tandem.engine.config.state_layers import KimiDeltaAttention, StateLayer
from tandem.engine.kernels.base import Kernels, Products, StepLayout
from tandem.engine.kernels.kv_cache import GroupCache, kv_of, latents_of, states_of, unquantized
from tandem.engine.kernels.layers import (
    AttentionLayer,
    IndexQueries,
    InputNorm,
    LatentLayer,
    LayerNorm,
    Linear,
    Norm,
    RecurrentLayer,
)
from tandem.engine.kernels.reference import rms_norm
from tandem.engine.models.indexer import Indexer
from tandem.engine.models.parameters import AttentionParameters, LatentParameters, StateParameters


class Queries(NamedTuple):
    """The result of a layer's `store` for the step's tokens, which is the input of its `attend`."""

    q: Tensor
    gate: Tensor | None = None
    """[T, heads·v_dim], the output gate before the sigmoid; None without one."""
    indexed: IndexQueries | None = None
    """The inputs of the layer's indexer; None without one."""


_INDEX_NORM_EPS = 1e-6
"""The epsilon of the norm of index keys, which config.json does not have."""


def normed_linear(products: Products, hidden: Tensor, norm: InputNorm, linear: Linear) -> Tensor:
    """Return norm(hidden) · weightᵀ + bias → [T, out]; RMSNorm is fused with the product where the kernels do that."""
    if isinstance(norm, LayerNorm):
        hidden, norm = F.layer_norm(hidden, hidden.shape[-1:], norm.weight, norm.bias, norm.eps), None
    return products.norm_linear(hidden, norm, linear)


class AttentionBlock:
    """Grouped-query attention of one layer."""

    def __init__(
        self,
        spec: GroupedQueryAttention,
        index: int,
        norm: InputNorm,
        weights: AttentionParameters,
        *,
        norm_eps: float,
        rope: Tensor,
        query_factors: Tensor | None,
        kernels: Kernels,
        products: Products,
    ) -> None:
        """Prepare the weights for the kernels.

        `rope` is the table of `AttentionLayer.rope`, `index` the layer's index in the KV cache. `query_factors`
        [max_context] are those of `GroupedQueryAttention.query_scaling`, or None. `norm_eps` is the epsilon of the
        norms of queries and keys.
        """
        self.norm, self.output = norm, products.prepare(Linear(weights.output, weights.output_bias))
        self._kernels, self._products = kernels, products
        self._query_factors = query_factors
        self.input = products.prepare(Linear(weights.qkv, weights.qkv_bias))
        q_norm, k_norm = weights.q_norm, weights.k_norm
        if spec.qk_norm and not spec.qk_norm_weights:
            q_norm = k_norm = torch.ones(spec.qk_norm, device=rope.device)
        self._query_weight: Tensor | None = None
        if spec.norm_after_rope and q_norm is not None and k_norm is not None:
            # Rotation keeps the length of a vector, so only the weights must be applied after it: those of both norms
            # to the queries, as a score is a sum of products of their elements and the keys'.
            self._query_weight = q_norm.float() * k_norm.float()
            q_norm = k_norm = torch.ones_like(q_norm)
        self.cache_index = index
        """The layer's index in the pages of its KV group."""
        self._layer = AttentionLayer(index, spec.shape, rope, q_norm, k_norm, norm_eps, weights.sinks)
        self._stored = replace(self._layer, shape=spec.projected)
        self.stores_kv = spec.kv_layer is None
        """False if the layer attends to the keys and values of another layer."""
        self._value_size = spec.projected.qkv_rows[2]
        self._value_norm = Norm(torch.ones(spec.shape.v_dim, device=rope.device), norm_eps) if spec.value_norm else None
        self._output_scale = spec.output_scale
        self._gate_size = spec.shape.output_size if spec.output_gate else 0

    def store(self, hidden: Tensor, layout: StepLayout, cache: GroupCache) -> Queries:
        """Store the keys and values, if the layer has its own, of the step's tokens in `cache`; return the queries."""
        qkv = normed_linear(self._products, hidden, self.norm, self.input)
        gate = None
        if self._gate_size:
            gate, qkv = qkv[:, : self._gate_size], qkv[:, self._gate_size :].contiguous()
        if self._value_norm is not None and self._value_size:
            values = torch.unflatten(qkv[:, -self._value_size :], 1, (-1, len(self._value_norm.weight)))
            values.copy_(rms_norm(values, self._value_norm.weight, self._value_norm.eps))
        q = self._kernels.rope_and_store(qkv, self._stored, kv_of(cache), layout)
        if self._query_weight is not None:
            q *= self._query_weight
        return Queries(_scaled(q, self._query_factors, layout), gate)

    def attend(self, queries: Queries, layout: StepLayout, cache: GroupCache) -> Tensor:
        """Return the output [T, heads·v_dim] of the attention heads, before the output projection."""
        out = self._kernels.attention(queries.q, self._layer, kv_of(cache), layout)
        if self._output_scale != 1.0:
            out *= self._output_scale
        return out if queries.gate is None else out * torch.sigmoid(queries.gate)


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
        shared_indexer: Indexer | None,
        kernels: Kernels,
        products: Products,
    ) -> None:
        """Prepare the weights for the kernels.

        `rope` is the table of `LatentLayer.rope`, `index` the layer's index in the KV cache. `query_factors`
        [max_context] are those of `LatentAttention.query_scaling`, or None. `shared_indexer` is the indexer of the last
        layer before this one that has its own, or None.
        """
        self.norm, self.output = norm, products.prepare(Linear(weights.output, weights.output_bias))
        self._kernels, self._products = kernels, products
        self._query_factors = query_factors
        self.input = products.prepare(Linear(weights.down, weights.down_bias))
        self._query_up = None if weights.query_up is None else products.prepare(Linear(weights.query_up))
        self._query_norm = None if weights.query_norm is None else Norm(weights.query_norm, spec.norm_eps)
        self.cache_index = index
        """The layer's index in the pages of its KV group."""
        own = weights.indexer
        index_norm = None if own is None else LayerNorm(own.key_norm, own.key_norm_bias, _INDEX_NORM_EPS)
        latent_norm = Norm(weights.latent_norm, spec.norm_eps)
        self._layer = LatentLayer(index, spec.shape, rope, latent_norm, weights.kv_up, index_norm)
        self._indexer: Indexer | None = None
        if own is not None and self._query_norm is not None:
            self._indexer = Indexer(own, norm, self._query_norm, kernels=kernels, products=products)
        self.indexer = self._indexer or shared_indexer
        """The indexer that chooses the tokens of this layer, and of the next if that shares the choice; None = all."""
        self._sparse = spec.sparse

    def store(self, hidden: Tensor, layout: StepLayout, cache: GroupCache) -> Queries:
        """Store the latents of the step's tokens in `cache`, and return the rotated queries [T, heads, nope + rope]."""
        projected = self._layer.shape.projected
        down = self._products.norm_linear(hidden, self.norm, self.input)
        q, latents = down[:, :-projected], down[:, -projected:]
        index = None
        if self._indexer is not None:
            index = self._indexer.store(hidden, q.contiguous(), self._layer, unquantized(cache), layout)
        if self._query_up is not None and self._query_norm is not None:
            q = self._products.norm_linear(q.contiguous(), self._query_norm, self._query_up)
        q = self._kernels.latent_store(q, latents, self._layer, latents_of(cache), layout)
        return Queries(_scaled(q, self._query_factors, layout), indexed=index)

    def attend(self, queries: Queries, layout: StepLayout, cache: GroupCache) -> Tensor:
        """Return the output [T, heads·v_dim] of the attention heads, before the output projection."""
        if self._sparse:
            assert self.indexer is not None
            held, index = unquantized(cache), queries.indexed
            if index is None:
                chosen = self.indexer.last_choice
            else:
                chosen = self.indexer.choose(index, self._layer, held, layout)
            return self._kernels.sparse_attention(queries.q, chosen, self._layer, held, layout)
        return self._kernels.latent_attention(queries.q, self._layer, latents_of(cache), layout)


class StateBlock:
    """The state layer of one layer, which takes the place of its attention."""

    def __init__(
        self,
        spec: StateLayer,
        index: int,
        norm: InputNorm,
        weights: StateParameters,
        *,
        norm_eps: float,
        kernels: Kernels,
        products: Products,
    ) -> None:
        """Prepare the weights for the kernels; `index` is the layer's index in the pages of its group.

        `norm_eps` is the epsilon of the output norm.
        """
        self.norm, self.output = norm, products.prepare(Linear(weights.output, weights.output_bias))
        self._kernels, self._products = kernels, products
        self.input = products.prepare(Linear(weights.projections, weights.projections_bias))
        self._decay_up, self._gate_up = (
            None if weight is None else products.prepare(Linear(weight))
            for weight in (weights.decay_up, weights.gate_up)
        )
        self._layer = RecurrentLayer(
            index,
            spec,
            weights.convolution,
            weights.convolution_bias,
            weights.decay_log,
            weights.step_bias,
            weights.skip,
            None if weights.state_norm is None else Norm(weights.state_norm, norm_eps),
        )
        self._projected: Tensor | None = None
        """The projections [T, sum(projected)] of a step that verifies draft tokens, in the order of `RowChains`.

        Kept until its draft tokens are accepted. While the graph of such a step is captured, they keep their memory for
        the graph that accepts its draft tokens.
        """

    def store(self, hidden: Tensor, layout: StepLayout, cache: GroupCache) -> Queries:
        """Advance the states of the step's rows, and return the output [T, inner] before the output projection.

        If the step verifies draft tokens, `layout` is that of `verifying`.
        """
        projected = normed_linear(self._products, hidden, self.norm, self.input)
        if isinstance(self._layer.spec, KimiDeltaAttention):
            projected = self._second_products(projected, self._layer.spec)
        if (chains := layout.chains) is None:
            return Queries(self._kernels.mix_states(projected, self._layer, states_of(cache), layout))
        self._projected = projected = projected.index_select(0, chains.order)
        mixed = self._kernels.mix_states(projected, self._layer, states_of(cache), layout)
        padding = layout.slots.unsqueeze(-1) < 0
        return Queries(mixed.index_select(0, chains.places).masked_fill_(padding, 0))

    def accept_drafts(self, layout: StepLayout, cache: GroupCache) -> None:
        """Write the states after the accepted draft tokens of the newest step; `layout` is that of `accepting`."""
        projected, self._projected = self._projected, None
        assert projected is not None
        self._kernels.mix_states(projected, self._layer, states_of(cache), layout)

    def _second_products(self, projected: Tensor, spec: KimiDeltaAttention) -> Tensor:
        """Return [T, sum(projected)] from [T, sum(input_rows)], with the second products of decays and output gate."""
        *qkv, step, decay, gate = projected.split_with_sizes(spec.input_rows, -1)
        assert self._decay_up is not None
        assert self._gate_up is not None
        gates = normed_linear(self._products, gate.contiguous(), None, self._gate_up)
        decays = normed_linear(self._products, decay.contiguous(), None, self._decay_up)
        return torch.cat([*qkv, gates, step, decays], -1)

    def attend(self, queries: Queries, layout: StepLayout, cache: GroupCache) -> Tensor:
        """Return the output that `store` computed."""
        return queries.q


def _scaled(q: Tensor, factors: Tensor | None, layout: StepLayout) -> Tensor:
    """Multiply the queries [T, heads, any] by the factor of each token's position in place, if there are factors."""
    if factors is not None:
        q *= factors[layout.positions.long()].to(q.dtype)[:, None, None]
    return q
