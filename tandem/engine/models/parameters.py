"""The weights of a model, layer by layer.

q, k and v are stacked into one matrix for the kernels, and so are gate and up. H is the hidden size, E the number of
experts, I the inner size of a feed-forward network.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass

import torch
from torch import Tensor

from tandem.engine.kernels.layers import Experts
from tandem.engine.kernels.packed_weight import PackedWeight, Weight


@dataclass(frozen=True, slots=True)
class AttentionParameters:
    """The weights of grouped-query attention.

    In the stacked matrix the rows of q come first, then those of k and of v.
    """

    qkv: Weight
    """The stacked q, k and v weights: [(heads + kv_heads)·head_dim + kv_heads·v_dim, H].

    With an output gate, its heads·v_dim rows come before those of q.
    """
    qkv_bias: Tensor | None
    output: Weight
    """The output projection: [H, heads·v_dim]."""
    output_bias: Tensor | None
    q_norm: Tensor | None
    """The norm of queries; None without one.

    Its shape is [head_dim] if each head is normalized separately, else [heads·head_dim].
    """
    k_norm: Tensor | None
    """The norm of keys: [head_dim], or [kv_heads·head_dim]; None without one."""
    sinks: Tensor | None
    """The attention sink of each head: [heads] float32; None without sinks."""


@dataclass(frozen=True, slots=True)
class IndexerParameters:
    """The weights of the indexer of sparse attention; each rank has all of them."""

    index_key: Weight
    """The projection of the hidden state to the index key: [dim, H]."""
    key_norm: Tensor
    """The weight of the LayerNorm of index keys: [dim]."""
    key_norm_bias: Tensor
    head_weights: Tensor
    """The projection of the hidden state to the weights of the heads: [heads, H]."""
    query_up: Weight
    """The projection of the query latent to the index queries: [heads·dim, query_rank]."""


@dataclass(frozen=True, slots=True)
class LatentParameters:
    """The weights of latent attention.

    Rotated rows are ordered as in grouped-query attention: the two rows of a pair are half a width apart.
    """

    down: Weight
    """The projections of the hidden state: [query_rank + latent + rope, H].

    Without a query rank, they are [heads·(nope + rope) + latent + rope, H].
    """
    down_bias: Tensor | None
    query_norm: Tensor | None
    """The norm of the query latent: [query_rank]; None without a query rank."""
    query_up: Weight | None
    """The projection of the query latent: [heads·(nope + rope), query_rank]; None without a query rank."""
    latent_norm: Tensor
    """The norm of the KV latent: [latent]."""
    kv_up: Tensor
    """The projection of the KV latent, [heads, nope + v_dim, latent]: the keys of each head, then its values."""
    output: Weight
    """The output projection: [H, heads·v_dim]."""
    output_bias: Tensor | None
    indexer: IndexerParameters | None
    """The indexer of sparse attention; None without one."""


@dataclass(frozen=True, slots=True)
class StateParameters:
    """The weights of a state layer."""

    projections: Weight
    """The stacked input projections: [sum(projected), H], in the order of the spec's `projected`.

    Those of Kimi Delta Attention are [sum(input_rows), H], in the order of `input_rows`.
    """
    projections_bias: Tensor | None
    convolution: Tensor
    """The weight of the convolution: [heads·channels, width], in the order of the spec's `convolved`."""
    convolution_bias: Tensor | None
    decay_log: Tensor | None
    """The logarithm of each head's rate of decay: [heads] float32; None without a recurrent state."""
    step_bias: Tensor | None
    """The bias of dt: [heads] float32, or [inner] for Kimi Delta Attention; None without a recurrent state."""
    skip: Tensor | None
    """The factor of each head's input in its output: [heads] float32; None except for Mamba-2."""
    state_norm: Tensor | None
    """The norm of the output: [value_dim] for each head, or [inner] for Mamba-2; None without one."""
    output: Weight
    """The output projection: [H, inner]."""
    output_bias: Tensor | None
    decay_up: Weight | None = None
    """The second product of the decays: [inner, rank]; None except for Kimi Delta Attention."""
    gate_up: Weight | None = None
    """The second product of the output gate: [inner, rank]; None except for Kimi Delta Attention."""


@dataclass(frozen=True, slots=True)
class DenseParameters:
    """The weights of a dense feed-forward network; in the stacked matrix the gate rows come first."""

    gate_up: Weight
    """The stacked gate and up weights: [2·I, H], or the up weight alone, [I, H], if the network has no gate."""
    gate_up_bias: Tensor | None
    down: Weight
    """The down projection: [H, I]."""
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class EmbeddingParameters:
    """The weights with which one layer adds its embedding, of P elements, to the hidden states."""

    gate: Weight
    """The projection of the hidden states: [P, H]."""
    output: Weight
    """The projection of the gated embedding: [H, P]."""
    norm: Tensor
    """The norm of the result: [H]."""


@dataclass(frozen=True, slots=True)
class ExpertNorms:
    """The norms, each [H], of a layer whose shared expert has others (`MixtureOfExperts.separate_norms`)."""

    input_norm: Tensor
    """The norm of the input of the experts other than the shared one, whose norm is `feed_forward_norm`."""
    output_norm: Tensor
    """The norm of the sum of their outputs."""
    shared_output_norm: Tensor
    """The norm of the shared expert's output."""


@dataclass(frozen=True, slots=True)
class LayerParameters:
    """The weights of one layer. Norms are [H]."""

    input_norm: Tensor | None
    """The norm of the input of attention; None without one."""
    attention: AttentionParameters | LatentParameters | StateParameters
    attention_output_norm: Tensor | None
    """The norm of the attention output, None without one; see `LayerSpec.output_norms`."""
    feed_forward_norm: Tensor | None
    """The norm of the input of the feed-forward network: None without one, `input_norm` if `LayerSpec.parallel`."""
    feed_forward: DenseParameters | Experts | None
    feed_forward_output_norm: Tensor | None
    input_norm_bias: Tensor | None = None
    feed_forward_norm_bias: Tensor | None = None
    embedding: EmbeddingParameters | None = None
    """The weights of the layer's embedding; None without one."""
    scale: Tensor | None = None
    """The factor of the hidden states after the layer, [1]; None without one."""
    expert_norms: ExpertNorms | None = None
    """The norms of experts beside a shared one with norms of its own; None without them."""


@dataclass(frozen=True, slots=True)
class LayerEmbeddingParameters:
    """The embeddings that each of L layers has for itself, of P elements each."""

    table: Tensor
    """The embeddings of each token: [vocab, L·P]."""
    projection: Weight
    """The projection of the hidden states before the first layer: [L·P, H]."""
    norm: Tensor
    """The norm of the projection of each layer: [P]."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """All weights of a model. They are allocated once and written in place; this object owns their memory."""

    dtype: torch.dtype
    """The model's dtype: that of activations, and of weights that are not packed."""
    embedding: Weight
    """The embedding of each token: [vocab, H]."""
    lm_head: Weight
    """The output layer, [vocab, H]; the same object as `embedding` if the model ties them."""
    final_norm: Tensor
    """The norm before the output layer: [H]."""
    layers: tuple[LayerParameters, ...]
    final_norm_bias: Tensor | None = None
    layer_embedding: LayerEmbeddingParameters | None = None
    """The embeddings of each layer; None without them."""


def tensors_of(parameters: object) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor once, with the name of its field.

    Tied embeddings are yielded as one tensor, and a packed weight as several.
    """
    for path, weight in named_weights(parameters):
        for tensor in weight.parts() if isinstance(weight, PackedWeight) else (weight,):
            yield path.rpartition(".")[2], tensor


def named_weights(parameters: object) -> Iterator[tuple[str, Weight]]:
    """Yield every weight once, with the path of its field (`layers.0.attention.qkv`)."""
    seen: set[int] = set()
    for path, weight in _walk(parameters, ""):
        if id(weight) not in seen:
            seen.add(id(weight))
            yield path, weight


def _walk(tree: object, path: str) -> Iterator[tuple[str, Weight]]:
    start = f"{path}." if path else ""
    if isinstance(tree, Tensor | PackedWeight):
        yield path, tree
    elif isinstance(tree, tuple):
        for number, item in enumerate(tree):
            yield from _walk(item, f"{start}{number}")
    elif is_dataclass(tree):
        for field in fields(tree):
            yield from _walk(getattr(tree, field.name), start + field.name)
