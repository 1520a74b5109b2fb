"""The layers of a decoder, prepared for the kernels."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from torch import Tensor

from tandem.engine.config.kv import kv_groups, kv_layer_of
from tandem.engine.config.model import GroupedQueryAttention, MixtureOfExperts, ModelSpec, QueryScaling
from tandem.engine.config.rope import RopeConfig
from tandem.engine.config.state_layers import ShortConvolution, StateLayer
from tandem.engine.expert_tokens import ExpertTokens
from tandem.engine.kernels.base import Kernels, Products
from tandem.engine.kernels.layers import Experts, LayerNorm, Norm
from tandem.engine.models.blocks import AttentionBlock, LatentBlock, StateBlock
from tandem.engine.models.feed_forward import DenseBlock, ExpertsBlock, FeedForwardBlock, SeparateExpertsBlock
from tandem.engine.models.indexer import Indexer
from tandem.engine.models.layer_embedding import EmbeddingBlock
from tandem.engine.models.parameters import (
    AttentionParameters,
    DenseParameters,
    LatentParameters,
    LayerParameters,
    Parameters,
    StateParameters,
)
from tandem.engine.models.rope import query_factors, rope_table

RopeTable = Callable[[RopeConfig | None, int], Tensor]
QueryFactors = Callable[[QueryScaling | None], Tensor | None]


class CacheLayer(NamedTuple):
    """The location of a layer's KV: the number of the layer's group, and the layer's index in that group's pages."""

    group: int
    layer: int


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """A layer: its attention and feed-forward blocks, their output norms if any, and its group in the KV cache."""

    attention: AttentionBlock | LatentBlock | StateBlock
    attention_output_norm: Norm | None
    feed_forward: FeedForwardBlock | None
    feed_forward_output_norm: Norm | None
    group: int
    parallel: bool
    """True if attention and feed-forward network have the same input (`LayerSpec.parallel`)."""
    embedding: EmbeddingBlock | None
    """The block that adds the layer's own embedding of the tokens; None without one."""
    scale: Tensor | None
    """The factor [1] of the hidden states after the layer; None without one."""


def prepare_layers(
    spec: ModelSpec,
    parameters: Parameters,
    kernels: Kernels,
    products: Products,
    *,
    max_context: int,
    expert_tokens: ExpertTokens,
) -> list[DecoderLayer]:
    """Prepare all layers for the kernels; layers with the same rotary embedding or query scaling share its table.

    `products` computes the matrix products: `kernels` itself, or a wrapper of it that applies adapters.
    """
    device = parameters.final_norm.device
    tables: dict[tuple[RopeConfig | None, int], Tensor] = {}

    def table(rope: RopeConfig | None, dims: int) -> Tensor:
        if (rope, dims) not in tables:
            tables[rope, dims] = rope_table(rope, dims, max_context, device)
        return tables[rope, dims]

    @cache
    def factors(scaling: QueryScaling | None) -> Tensor | None:
        return None if scaling is None else query_factors(scaling, max_context, device)

    slots = {
        layer: CacheLayer(number, index)
        for number, group in enumerate(kv_groups(spec))
        for index, layer in enumerate(group.layers)
    }
    shared = {number: source for number, layer in enumerate(spec.layers) if (source := kv_layer_of(layer)) is not None}
    slots |= {number: slots[source] for number, source in shared.items()}
    layers: list[DecoderLayer] = []
    indexer: Indexer | None = None
    for number, weights in enumerate(parameters.layers):
        layer = _prepare_layer(
            spec,
            number,
            slots[number],
            weights,
            kernels=kernels,
            products=products,
            table=table,
            factors=factors,
            expert_tokens=expert_tokens,
            indexer=indexer,
        )
        if isinstance(layer.attention, LatentBlock):
            indexer = layer.attention.indexer
        layers.append(layer)
    return layers


def _prepare_layer(
    spec: ModelSpec,
    number: int,
    slot: CacheLayer,
    weights: LayerParameters,
    *,
    kernels: Kernels,
    products: Products,
    table: RopeTable,
    factors: QueryFactors,
    expert_tokens: ExpertTokens,
    indexer: Indexer | None,
) -> DecoderLayer:
    layer = spec.layers[number]
    attention, feed_forward = layer.attention, layer.feed_forward
    outer, inner = weights.attention, weights.feed_forward
    norms = (weights.input_norm, weights.input_norm_bias), (weights.feed_forward_norm, weights.feed_forward_norm_bias)
    before, between = (None if weight is None else input_norm(spec, weight, bias) for weight, bias in norms)
    attention_block: AttentionBlock | LatentBlock | StateBlock
    if isinstance(attention, StateLayer):
        assert isinstance(outer, StateParameters)
        attention_block = StateBlock(
            attention,
            slot.layer,
            before,
            outer,
            norm_eps=spec.norm_eps if isinstance(attention, ShortConvolution) else attention.norm_eps,
            kernels=kernels,
            products=products,
        )
    elif isinstance(attention, GroupedQueryAttention):
        assert isinstance(outer, AttentionParameters)
        rope = table(attention.rope, attention.shape.rotated)
        attention_block = AttentionBlock(
            attention,
            slot.layer,
            before,
            outer,
            norm_eps=spec.norm_eps,
            rope=rope,
            query_factors=factors(attention.query_scaling),
            kernels=kernels,
            products=products,
        )
    else:
        assert isinstance(outer, LatentParameters)
        assert isinstance(before, Norm)
        rope = table(attention.rope, attention.shape.rope)
        attention_block = LatentBlock(
            attention,
            slot.layer,
            before,
            outer,
            rope=rope,
            query_factors=factors(attention.query_scaling),
            shared_indexer=indexer,
            kernels=kernels,
            products=products,
        )
    feed_forward_block: FeedForwardBlock | None = None
    if isinstance(feed_forward, MixtureOfExperts):
        assert isinstance(inner, Experts)
        counted = replace(inner, tokens=expert_tokens.of_layer(number))
        if weights.expert_norms is not None:
            assert isinstance(between, Norm)
            feed_forward_block = SeparateExpertsBlock(
                feed_forward, between, weights.expert_norms, counted, kernels=kernels, products=products
            )
        else:
            assert isinstance(between, Norm) or (between is not None and between.bias is None)
            feed_forward_block = ExpertsBlock(feed_forward, between, counted, kernels=kernels, products=products)
    elif feed_forward is not None:
        assert isinstance(inner, DenseParameters)
        feed_forward_block = DenseBlock(feed_forward, between, inner, kernels=kernels, products=products)
    return DecoderLayer(
        attention_block,
        _output_norm(weights.attention_output_norm, spec),
        feed_forward_block,
        _output_norm(weights.feed_forward_output_norm, spec),
        slot.group,
        layer.parallel,
        None if weights.embedding is None else EmbeddingBlock(weights.embedding, spec.norm_eps, kernels),
        weights.scale,
    )


def input_norm(spec: ModelSpec, weight: Tensor, bias: Tensor | None) -> Norm | LayerNorm:
    """Return the norm of a product's input: RMSNorm, or LayerNorm if the model has `layer_norms`."""
    return LayerNorm(weight, bias, spec.norm_eps) if spec.layer_norms else Norm(weight, spec.norm_eps)


def _output_norm(weight: Tensor | None, spec: ModelSpec) -> Norm | None:
    return None if weight is None else Norm(weight, spec.norm_eps)
