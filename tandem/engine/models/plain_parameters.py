"""Allocates the weights of each kind of layer in their plain form, in the shapes that the model's spec gives them."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from tandem.engine.config.attention import IndexShape
from tandem.engine.config.model import (
    Attention,
    DenseFeedForward,
    FeedForward,
    LatentAttention,
    LayerSpec,
    MixtureOfExperts,
    ModelSpec,
)
from tandem.engine.config.state_layers import GatedDeltaNet, KimiDeltaAttention, Mamba2, ShortConvolution, StateLayer
from tandem.engine.kernels.layers import Experts, Linear
from tandem.engine.models.parameters import (
    AttentionParameters,
    DenseParameters,
    EmbeddingParameters,
    ExpertNorms,
    IndexerParameters,
    LatentParameters,
    LayerEmbeddingParameters,
    LayerParameters,
    Parameters,
    StateParameters,
)

Empty = Callable[..., Tensor]


def plain_parameters(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> Parameters:
    """Return uninitialized weights on `device`, none of which is packed."""
    empty = partial(_empty, dtype, device)
    norm = partial(_empty, torch.float32 if spec.wide_norms else dtype, device)
    hidden = spec.hidden_size
    embedding = empty(spec.vocab_size, hidden)
    embedded = len(spec.layers) * spec.layer_embedding
    return Parameters(
        dtype=dtype,
        embedding=embedding,
        lm_head=embedding if spec.tied_embeddings else empty(spec.vocab_size, hidden),
        final_norm=norm(hidden),
        layers=tuple(_layer(spec, layer, empty, norm) for layer in spec.layers),
        final_norm_bias=norm(hidden) if spec.norm_bias else None,
        layer_embedding=LayerEmbeddingParameters(
            empty(spec.vocab_size, embedded), empty(embedded, hidden), norm(spec.layer_embedding)
        )
        if embedded
        else None,
    )


def _layer(model: ModelSpec, spec: LayerSpec, empty: Empty, norm: Empty) -> LayerParameters:
    hidden, norm_bias, embedded = model.hidden_size, model.norm_bias, model.layer_embedding
    before = norm(hidden) if spec.input_norms else None
    return LayerParameters(
        input_norm=before,
        attention=_attention(spec.attention, hidden, empty, norm),
        attention_output_norm=norm(hidden) if spec.output_norms else None,
        feed_forward_norm=norm(hidden) if spec.input_norms and spec.feed_forward and not spec.parallel else before,
        feed_forward=_feed_forward(spec.feed_forward, hidden, empty, norm),
        feed_forward_output_norm=norm(hidden) if spec.output_norms else None,
        input_norm_bias=norm(hidden) if norm_bias else None,
        feed_forward_norm_bias=norm(hidden) if norm_bias else None,
        embedding=EmbeddingParameters(empty(embedded, hidden), empty(hidden, embedded), norm(hidden))
        if embedded
        else None,
        scale=empty(1) if spec.scaled else None,
        expert_norms=_expert_norms(spec.feed_forward, hidden, norm),
    )


def _feed_forward(spec: FeedForward | None, hidden: int, empty: Empty, norm: Empty) -> DenseParameters | Experts | None:
    if spec is None:
        return None
    return _experts(spec, hidden, empty, norm) if isinstance(spec, MixtureOfExperts) else _dense(spec, hidden, empty)


def _attention(
    spec: Attention, hidden: int, empty: Empty, norm: Empty
) -> AttentionParameters | LatentParameters | StateParameters:
    if isinstance(spec, StateLayer):
        return _state(spec, hidden, empty)
    if isinstance(spec, LatentAttention):
        return _latent(spec, hidden, empty, norm)
    shape, projected = spec.shape, spec.projected
    heads = spec.qk_norm // shape.head_dim  # the heads that are normalized together: 1, or all
    kv_elements = shape.head_dim if heads == 1 else shape.kv_heads * shape.head_dim
    rows = projected.qkv_size + (shape.output_size if spec.output_gate else 0)
    return AttentionParameters(
        qkv=empty(rows, hidden),
        qkv_bias=empty(rows) if spec.qkv_bias else None,
        output=empty(hidden, shape.output_size),
        output_bias=empty(hidden) if spec.output_bias else None,
        q_norm=norm(spec.qk_norm) if spec.qk_norm and spec.qk_norm_weights else None,
        k_norm=norm(kv_elements) if spec.qk_norm and spec.qk_norm_weights and projected.kv_heads else None,
        sinks=empty(shape.heads).float() if spec.sinks else None,
    )


def _state(spec: StateLayer, hidden: int, empty: Empty) -> StateParameters:
    kimi = spec if isinstance(spec, KimiDeltaAttention) else None
    channels, rows = spec.state.heads * spec.state.channels, sum(kimi.input_rows if kimi else spec.projected)
    plain = isinstance(spec, ShortConvolution)
    biased = isinstance(spec, Mamba2 | ShortConvolution) and spec.bias
    steps = 0 if plain else spec.projected[-1]
    convolution_bias = spec.convolution_bias if isinstance(spec, Mamba2) else biased
    norm = spec.value_dim if isinstance(spec, GatedDeltaNet) else kimi.head_dim if kimi else spec.inner
    return StateParameters(
        projections=empty(rows, hidden),
        projections_bias=empty(rows) if biased else None,
        convolution=empty(channels, spec.width),
        convolution_bias=empty(channels) if convolution_bias else None,
        decay_log=None if plain else empty(kimi.heads if kimi else steps).float(),
        step_bias=None if plain else empty(steps).float(),
        skip=empty(steps).float() if isinstance(spec, Mamba2) else None,
        state_norm=None if plain else empty(norm),
        output=empty(hidden, spec.inner),
        output_bias=empty(hidden) if biased else None,
        decay_up=empty(kimi.inner, kimi.rank) if kimi else None,
        gate_up=empty(kimi.inner, kimi.rank) if kimi else None,
    )


def _latent(spec: LatentAttention, hidden: int, empty: Empty, norm: Empty) -> LatentParameters:
    shape, rank = spec.shape, spec.query_rank
    queries = shape.heads * shape.query
    down = (queries if rank is None else rank) + shape.projected
    return LatentParameters(
        down=empty(down, hidden),
        down_bias=empty(down) if spec.bias else None,
        query_norm=None if rank is None else norm(rank),
        query_up=None if rank is None else empty(queries, rank),
        latent_norm=norm(shape.latent),
        kv_up=empty(shape.heads, shape.nope + shape.v_dim, shape.latent),
        output=empty(hidden, shape.heads * shape.v_dim),
        output_bias=empty(hidden) if spec.bias else None,
        indexer=None if shape.index is None or rank is None else _indexer(shape.index, rank, hidden, empty, norm),
    )


def _indexer(shape: IndexShape, rank: int, hidden: int, empty: Empty, norm: Empty) -> IndexerParameters:
    return IndexerParameters(
        index_key=empty(shape.dim, hidden),
        key_norm=norm(shape.dim),
        key_norm_bias=norm(shape.dim),
        head_weights=empty(shape.heads, hidden),
        query_up=empty(shape.heads * shape.dim, rank),
    )


def _dense(spec: DenseFeedForward, hidden: int, empty: Empty) -> DenseParameters:
    rows = 2 * spec.width if spec.gated else spec.width
    return DenseParameters(
        gate_up=empty(rows, hidden),
        gate_up_bias=empty(rows) if spec.bias else None,
        down=empty(hidden, spec.width),
        down_bias=empty(hidden) if spec.bias else None,
    )


def _expert_norms(spec: FeedForward | None, hidden: int, norm: Empty) -> ExpertNorms | None:
    separate = isinstance(spec, MixtureOfExperts) and spec.separate_norms
    return ExpertNorms(norm(hidden), norm(hidden), norm(hidden)) if separate else None


def _experts(spec: MixtureOfExperts, hidden: int, empty: Empty, norm: Empty) -> Experts:
    experts, width, router, outer = len(spec.local_experts), spec.width, spec.router, spec.outer(hidden)
    stacked = 2 if spec.gated else 1
    return Experts(
        router=empty(spec.experts, hidden),
        router_bias=empty(spec.experts) if router.bias else None,
        choice_bias=empty(spec.experts).float() if router.choice_bias else None,
        gate_up=empty(experts, stacked * width, outer),
        gate_up_bias=empty(experts, stacked * width) if spec.bias else None,
        down=empty(experts, outer, width),
        down_bias=empty(experts, outer) if spec.bias else None,
        shared_gate_up=Linear(empty(stacked * spec.shared_width, hidden)) if spec.shared_width else None,
        shared_down=Linear(empty(hidden, spec.shared_width)) if spec.shared_width else None,
        shared_gate=empty(1, hidden) if spec.shared_gate else None,
        router_norm=norm(hidden) if router.own_norm else None,
        expert_scales=empty(spec.experts).float() if router.expert_scales else None,
        latent_down=Linear(empty(spec.latent, hidden)) if spec.latent else None,
        latent_up=Linear(empty(hidden, spec.latent)) if spec.latent else None,
    )


def _empty(dtype: torch.dtype, device: torch.device, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def empty_like(shape: Tensor, device: torch.device) -> Tensor:
    """Return what `torch.empty_like` does, which imports SymPy for tensors on `meta`: 0.6 s of CPU for each start."""
    return _empty(shape.dtype, device, *shape.shape)
