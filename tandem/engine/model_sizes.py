"""The sizes of a model's steps, derived from its spec: weights, KV bytes and arithmetic operations."""

from dataclasses import replace

import torch

from tandem.cost_model.expert_exchange import ExpertExchange
from tandem.cost_model.roofline import CPU, GPU, ModelSizes, PackedWeights, Roofline, WindowedLayers, guess
from tandem.cost_model.step_collectives import StepCollectives
from tandem.cost_model.step_cost import CostParameters
from tandem.cost_model.step_grid import EACH_TOKEN, StepGrid, gpu_grid
from tandem.engine.cache.paged_cache import PagedCache
from tandem.engine.config.attention import LatentShape
from tandem.engine.config.kv import kv_elements, layer_bytes, state_of, window_of
from tandem.engine.config.model import (
    Attention,
    GroupedQueryAttention,
    LatentAttention,
    LayerSpec,
    MixtureOfExperts,
    ModelSpec,
)
from tandem.engine.config.sharding import Rank, local_experts_spec
from tandem.engine.config.state_layers import KimiDeltaAttention, StateLayer
from tandem.engine.kernels.base import is_cpu
from tandem.engine.models.allocation import packed_weights, saved_bytes
from tandem.settings.ceilings import Ceilings

_ATTENTION_FLOP = 2
"""The operations per pair of query and key, and per dimension of keys and of values: one product, one addition."""


def model_sizes(
    spec: ModelSpec, item_bytes: int, kv_element_bytes: float | None = None, *, on_cpu: bool = False
) -> ModelSizes:
    """Return the sizes of a model, computed from its matrices alone.

    Norms, biases and the embedding of a few tokens are negligible. `item_bytes` is the size of an unquantized weight
    element, `kv_element_bytes` that of a KV element; None = the same. Packed weights have the size in which the kernels
    of a CPU or GPU keep them.
    """
    kv_bytes = item_bytes if kv_element_bytes is None else kv_element_bytes
    output = spec.vocab_size * spec.hidden_size
    experts = sum(expert_weights(layer, spec.hidden_size) for layer in spec.layers)
    every_step = (
        output + _embedding_weights(spec) + sum(_dense_weights(layer, spec.hidden_size) for layer in spec.layers)
    )
    saved = saved_bytes(spec, item_bytes, on_cpu=on_cpu)
    windows = sorted({window for layer in spec.layers if (window := window_of(layer)) is not None})
    return ModelSizes(
        weights=active_weights(spec),
        weight_bytes=every_step * item_bytes - saved.every_step,
        kv_bytes_per_token=kv_bytes_per_token(spec, kv_bytes),
        attention_flop_per_pair=sum(_pair_flop(layer.attention) for layer in spec.layers),
        output_weights=output,
        expert_bytes=experts * item_bytes - saved.experts,
        expert_share=max(map(_expert_share, spec.layers)),
        packed=PackedWeights() if on_cpu else packed_weights(spec),
        windowed=(
            *(_layers_of(spec, window, kv_bytes) for window in windows),
            *_sparse_layers(spec, kv_bytes),
        ),
        state_bytes=state_bytes(spec, item_bytes),
    )


def local_experts_sizes(spec: ModelSpec, gpus: int, item_bytes: int, kv_element_bytes: float) -> ModelSizes:
    """Return the sizes of the part of a model that each of `gpus` GPUs holds (`local_experts_spec`).

    Each step reads all of a GPU's experts, because all GPUs' tokens choose among them. A GPU computes as many expert
    products as its own tokens need, in FP8 if the model's other products are.
    """
    sizes = model_sizes(local_experts_spec(spec, gpus), item_bytes, kv_element_bytes)
    packed = sizes.packed
    if packed.float8:
        chosen = sum(round(expert_weights(layer, spec.hidden_size) * _expert_share(layer)) for layer in spec.layers)
        packed = replace(packed, float8=packed.float8 + chosen)
    return replace(sizes, weights=active_weights(spec), expert_share=1.0, packed=packed)


def expert_exchange(spec: ModelSpec, gpus: int) -> ExpertExchange:
    """Return the all-to-all exchange in each step of `gpus` GPUs that each hold a part of the experts."""
    networks = [layer.feed_forward for layer in spec.layers if isinstance(layer.feed_forward, MixtureOfExperts)]
    chosen, outer = max((network.top_k, network.outer(spec.hidden_size)) for network in networks)
    return ExpertExchange(gpus, len(networks), chosen, outer)


def _layers_of(spec: ModelSpec, window: int, element_bytes: float) -> WindowedLayers:
    """Return the KV bytes and operations of the layers with this sliding window."""
    layers = [layer for layer in spec.layers if window_of(layer) == window]
    pair_flop = sum(_pair_flop(layer.attention) for layer in layers)
    return WindowedLayers(window, round(kv_elements(layers) * element_bytes), pair_flop)


def _sparse_layers(spec: ModelSpec, element_bytes: float) -> tuple[WindowedLayers, ...]:
    """Return the KV bytes and operations of sparse attention without its indexers, if the model has any.

    A token reads the latents of as many tokens as with a window of `top_k`, but the index keys of all. All indexers of
    a model choose the same number of tokens.
    """
    latents = [layer.attention for layer in spec.layers if isinstance(layer.attention, LatentAttention)]
    shapes = [attention.shape for attention in latents if attention.sparse]
    chosen = [shape.index.top_k for shape in shapes if shape.index is not None]
    if not chosen:
        return ()
    latent_bytes = round(sum(shape.projected for shape in shapes) * element_bytes)
    return (WindowedLayers(chosen[0], latent_bytes, sum(map(_latent_flop, shapes))),)


def kv_bytes_per_token(spec: ModelSpec, element_bytes: float) -> int:
    """Return the bytes of one token's KV in all layers; `element_bytes` includes an element's share of its scale."""
    return round(kv_elements(spec.layers) * element_bytes)


def state_bytes(spec: ModelSpec, item_bytes: int) -> int:
    """Return the bytes of one request's states in all layers; `item_bytes` is the size of an element of activations."""
    return sum(layer_bytes(state, item_bytes) for layer in spec.layers if (state := state_of(layer)) is not None)


def active_weights(spec: ModelSpec) -> int:
    """Return the number of matrix elements that each token is multiplied with, including the output layer."""
    layers = sum(layer_weights(layer, spec.hidden_size) for layer in spec.layers)
    return layers + _embedding_weights(spec) + spec.vocab_size * spec.hidden_size


def total_weights(spec: ModelSpec) -> int:
    """Return the number of elements of all matrices, including the embedding; tied embeddings count once."""
    matrices = spec.vocab_size * spec.hidden_size * (1 if spec.tied_embeddings else 2)
    counts = (
        _dense_weights(layer, spec.hidden_size) + expert_weights(layer, spec.hidden_size) for layer in spec.layers
    )
    tables = spec.vocab_size * len(spec.layers) * spec.layer_embedding
    return matrices + tables + _embedding_weights(spec) + sum(counts)


def matrix_bytes(spec: ModelSpec, item_bytes: int, *, on_cpu: bool = False) -> int:
    """Return the bytes of all matrices.

    An unquantized element has `item_bytes`; packed matrices have the size in which the kernels keep them.
    """
    return total_weights(spec) * item_bytes - sum(saved_bytes(spec, item_bytes, on_cpu=on_cpu))


def layer_weights(layer: LayerSpec, hidden: int) -> int:
    """Return the number of matrix elements of one layer that each token is multiplied with."""
    return _dense_weights(layer, hidden) + round(expert_weights(layer, hidden) * _expert_share(layer))


def expert_weights(layer: LayerSpec, hidden: int) -> int:
    """Return the number of elements of a layer's experts, without the shared expert; 0 for a dense layer."""
    moe = layer.feed_forward
    if not isinstance(moe, MixtureOfExperts):
        return 0
    return (3 if moe.gated else 2) * moe.outer(hidden) * moe.width * len(moe.local_experts)


def roofline(spec: ModelSpec, cache: PagedCache, item_bytes: int) -> Roofline:
    """Return the roofline of the model, with the rates of a typical device of this kind.

    `item_bytes` is the size of a weight element.
    """
    on_cpu = is_cpu(cache.device)
    sizes = model_sizes(spec, item_bytes, cache.element_bytes, on_cpu=on_cpu)
    return Roofline(sizes, CPU if on_cpu else GPU)


def step_collectives(spec: ModelSpec, ranks: int, item_bytes: int, device: Ceilings) -> StepCollectives:
    """Return the collective operations of each step of a model that is divided among `ranks` > 1 ranks.

    `spec` is that of the whole model, and `item_bytes` the size of an element of the hidden states.
    """
    rows = len(Rank(0, ranks).rows(spec.vocab_size))
    sums, hidden = 2 * len(spec.layers) + 1, spec.hidden_size * item_bytes
    return StepCollectives(ranks, sums, hidden, rows * item_bytes, device.link_bytes_per_s)


def context_collectives(
    spec: ModelSpec, ranks: int, item_bytes: int, kv_element_bytes: float, device: Ceilings
) -> StepCollectives:
    """Return the collective operations of each step of `ranks` > 1 ranks that divide the tokens of prompts.

    The embeddings are broadcast, and the KV of each layer is gathered. `kv_element_bytes` is the size of a KV element.
    """
    hidden, kv = spec.hidden_size * item_bytes, kv_bytes_per_token(spec, kv_element_bytes)
    return StepCollectives(ranks, 1, hidden, 0, device.link_bytes_per_s, len(spec.layers), kv)


def cost_guess(spec: ModelSpec, cache: PagedCache, item_bytes: int) -> CostParameters:
    """Return the predicted cost of steps on this device, which is used until steps have been measured."""
    limits, grid = roofline(spec, cache, item_bytes), step_grid(spec, cache.device)
    return guess(limits.sizes, limits.ceilings, grid)


def step_grid(spec: ModelSpec, device: torch.device) -> StepGrid:
    """Return the granularity of tokens and rows in which `device` computes prefill steps."""
    if device.type != "cuda":
        return EACH_TOKEN
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return gpu_grid(spec.heads, multiprocessors)


def _embedding_weights(spec: ModelSpec) -> int:
    """Return the number of elements of the matrices that multiply the layers' own embeddings of tokens."""
    return 3 * len(spec.layers) * spec.layer_embedding * spec.hidden_size


def _dense_weights(layer: LayerSpec, hidden: int) -> int:
    """Return the number of elements of those matrices of a layer that every step reads."""
    feed_forward = layer.feed_forward
    if feed_forward is None:
        inner = 0
    elif isinstance(feed_forward, MixtureOfExperts):
        inner = (3 if feed_forward.gated else 2) * feed_forward.shared_width
        inner += feed_forward.experts + 2 * feed_forward.latent
    else:
        inner = (3 if feed_forward.gated else 2) * feed_forward.width
    return _attention_weights(layer.attention, hidden) + hidden * inner


def _attention_weights(attention: Attention, hidden: int) -> int:
    if isinstance(attention, GroupedQueryAttention):
        shape = attention.shape
        gate = shape.output_size if attention.output_gate else 0
        return hidden * (attention.projected.qkv_size + gate + shape.output_size)
    if isinstance(attention, KimiDeltaAttention):
        return hidden * (sum(attention.input_rows) + attention.inner) + 2 * attention.rank * attention.inner
    if isinstance(attention, StateLayer):
        return hidden * (sum(attention.projected) + attention.inner)
    latent, rank = attention.shape, attention.query_rank
    queries = latent.heads * latent.query
    down = hidden * ((queries if rank is None else rank) + latent.projected)
    up = (0 if rank is None else queries * rank) + latent.heads * (latent.nope + latent.v_dim) * latent.latent
    indexer = 0
    if (index := latent.index) is not None and rank is not None:
        indexer = hidden * (index.dim + index.heads) + rank * index.heads * index.dim
    return down + up + hidden * latent.heads * latent.v_dim + indexer


def _pair_flop(attention: Attention) -> int:
    """Return the operations in one layer for one token that attends to one other token."""
    if isinstance(attention, StateLayer):
        return 0
    if isinstance(attention, GroupedQueryAttention):
        return _ATTENTION_FLOP * attention.shape.heads * (attention.shape.head_dim + attention.shape.v_dim)
    index = attention.shape.index
    return _latent_flop(attention.shape) + (0 if index is None else _ATTENTION_FLOP * index.heads * index.dim)


def _latent_flop(shape: LatentShape) -> int:
    return _ATTENTION_FLOP * shape.heads * (shape.query + shape.v_dim)


def _expert_share(layer: LayerSpec) -> float:
    moe = layer.feed_forward
    return moe.top_k / moe.experts if isinstance(moe, MixtureOfExperts) else 0.0
