"""The kinds of attention and of feed-forward networks that a layer may have, over prepared weights."""

from typing import NamedTuple

from torch import Tensor

from tandem.engine.config.model import DenseFeedForward, GroupedQueryAttention, LatentAttention, MixtureOfExperts
from tandem.engine.kernels.base import Experts, Kernels, Linear, StepLayout
from tandem.engine.kernels.kv_cache import KvCache, unquantized
from tandem.engine.models.parameters import AttentionParameters, DenseParameters, LatentParameters


class Norm(NamedTuple):
    """The RMSNorm before a block: weight [hidden size] and epsilon."""

    weight: Tensor
    eps: float


class AttentionBlock:
    """Grouped-query attention of one layer."""

    def __init__(
        self,
        spec: GroupedQueryAttention,
        layer: int,
        norm: Norm,
        weights: AttentionParameters,
        *,
        rope: Tensor,
        kernels: Kernels,
    ) -> None:
        """Prepares the weights; `rope` is the table of `Kernels.rope_and_store`, `layer` the index in the cache."""
        self.output = kernels.prepare(Linear(weights.output, weights.output_bias))
        self._shape, self._layer, (self._norm, self._eps) = spec.shape, layer, norm
        self._qkv = kernels.prepare(Linear(weights.qkv, weights.qkv_bias))
        self._q_norm, self._k_norm, self._sinks = weights.q_norm, weights.k_norm, weights.sinks
        self._rope, self._kernels = rope, kernels

    def store(self, hidden: Tensor, layout: StepLayout, cache: KvCache) -> Tensor:
        """Stores the keys and values of the step's tokens → their queries."""
        qkv = self._kernels.norm_linear(hidden, self._norm, self._eps, self._qkv)
        return self._kernels.rope_and_store(
            qkv, self._rope, self._q_norm, self._k_norm, self._eps, cache, self._layer, layout, self._shape
        )

    def attend(self, q: Tensor, layout: StepLayout, cache: KvCache) -> Tensor:
        """Returns attention's heads [T, heads·head_dim], before the output product."""
        return self._kernels.attention(q, cache, self._layer, layout, self._shape, self._sinks)


class LatentBlock:
    """Latent attention of one layer."""

    def __init__(
        self,
        spec: LatentAttention,
        layer: int,
        norm: Norm,
        weights: LatentParameters,
        *,
        rope: Tensor,
        kernels: Kernels,
    ) -> None:
        """Prepares the weights; `rope` is the table of `Kernels.latent_store`, `layer` the index in the cache."""
        self.output = kernels.prepare(Linear(weights.output, weights.output_bias))
        self._spec, self._layer, (self._norm, self._eps) = spec, layer, norm
        self._down = kernels.prepare(Linear(weights.down, weights.down_bias))
        self._query_up = None if weights.query_up is None else kernels.prepare(Linear(weights.query_up))
        self._query_norm, self._latent_norm, self._kv_up = weights.query_norm, weights.latent_norm, weights.kv_up
        self._rope, self._kernels = rope, kernels

    def store(self, hidden: Tensor, layout: StepLayout, cache: KvCache) -> Tensor:
        """Stores the latents of the step's tokens → their queries [T, heads, nope + rope], rotated."""
        kernels, shape = self._kernels, self._spec.shape
        down = kernels.norm_linear(hidden, self._norm, self._eps, self._down)
        q, latents = down[:, : -shape.cached], down[:, -shape.cached :]
        if self._query_up is not None and self._query_norm is not None:
            q = kernels.norm_linear(q.contiguous(), self._query_norm, self._spec.norm_eps, self._query_up)
        plain, eps = unquantized(cache), self._spec.norm_eps
        return kernels.latent_store(q, latents, self._rope, self._latent_norm, eps, plain, self._layer, layout, shape)

    def attend(self, q: Tensor, layout: StepLayout, cache: KvCache) -> Tensor:
        """Returns attention's heads [T, heads·v_dim], before the output product."""
        return self._kernels.latent_attention(q, self._kv_up, unquantized(cache), self._layer, layout, self._spec.shape)


class DenseBlock:
    """The feed-forward network of one layer."""

    def __init__(self, spec: DenseFeedForward, norm: Norm, weights: DenseParameters, kernels: Kernels) -> None:
        self._spec, (self._norm, self._eps), self._kernels = spec, norm, kernels
        self._gate_up = kernels.prepare(Linear(weights.gate_up, weights.gate_up_bias))
        self._down = kernels.prepare(Linear(weights.down, weights.down_bias))

    def add(self, hidden: Tensor, slots: Tensor, output_norm: Tensor | None) -> None:
        """Adds the network's output to `hidden` in place, normed if `output_norm` is given."""
        kernels = self._kernels
        if output_norm is None:
            kernels.feed_forward(hidden, self._norm, self._eps, self._gate_up, self._down, self._spec.activation)
        else:
            active = kernels.norm_gate_up(hidden, self._norm, self._eps, self._gate_up, self._spec.activation)
            kernels.norm_add(kernels.linear(active, self._down), output_norm, self._eps, hidden)


class ExpertsBlock:
    """The mixture of experts of one layer."""

    def __init__(self, spec: MixtureOfExperts, norm: Norm, weights: Experts, kernels: Kernels) -> None:
        self._spec, (self._norm, self._eps), self._kernels = spec, norm, kernels
        self._experts = kernels.prepare_experts(weights)

    def add(self, hidden: Tensor, slots: Tensor, output_norm: Tensor | None) -> None:
        """Adds the experts' output to `hidden` in place. Tokens whose slot is -1 are padding and choose no expert."""
        assert output_norm is None
        self._kernels.experts(hidden, self._norm, self._eps, self._experts, self._spec, slots)
