"""A model's weights, layer by layer, with q/k/v and gate/up stacked for the kernels, and their places in a checkpoint.

H is the hidden size, E the number of experts, I the inner size of a feed-forward network.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import partial

import torch
from torch import Tensor

from engine.config.model import (
    Attention,
    DenseFeedForward,
    GroupedQueryAttention,
    LatentAttention,
    LayerSpec,
    MixtureOfExperts,
    ModelSpec,
)
from engine.kernels.base import Experts, Linear

Empty = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class AttentionParameters:
    """Grouped-query attention; rows of q, k and v follow one another."""

    qkv: Tensor
    """[(heads + 2·kv_heads)·head_dim, H]."""
    qkv_bias: Tensor | None
    output: Tensor
    """[H, heads·head_dim]."""
    output_bias: Tensor | None
    q_norm: Tensor | None
    """[head_dim] for each head by itself, or [heads·head_dim]."""
    k_norm: Tensor | None
    """[head_dim], or [kv_heads·head_dim]."""
    sinks: Tensor | None
    """[heads] float32."""


@dataclass(frozen=True, slots=True)
class LatentParameters:
    """Latent attention. The rotated rows have pairs half a width apart, as for grouped-query attention."""

    down: Tensor
    """[query_rank + latent + rope, H]: the latents; without a query_rank [heads·(nope + rope) + latent + rope, H]."""
    down_bias: Tensor | None
    query_norm: Tensor | None
    """[query_rank]."""
    query_up: Tensor | None
    """[heads·(nope + rope), query_rank]."""
    latent_norm: Tensor
    """[latent]."""
    kv_up: Tensor
    """[heads, nope + v_dim, latent]: each head's keys, then its values."""
    output: Tensor
    """[H, heads·v_dim]."""
    output_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class DenseParameters:
    """A feed-forward network; gate rows come first."""

    gate_up: Tensor
    """[2·I, H]."""
    gate_up_bias: Tensor | None
    down: Tensor
    """[H, I]."""
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class LayerParameters:
    """One layer. Norms are [H]."""

    input_norm: Tensor
    attention: AttentionParameters | LatentParameters
    attention_output_norm: Tensor | None
    """The norm of attention's output, see `LayerSpec.output_norms`."""
    feed_forward_norm: Tensor
    feed_forward: DenseParameters | Experts
    feed_forward_output_norm: Tensor | None


@dataclass(frozen=True, slots=True)
class Parameters:
    """All weights of a model. Allocated once and written in place; this object owns the memory."""

    embedding: Tensor
    """[vocab, H]."""
    lm_head: Tensor
    """[vocab, H]; the very same tensor as `embedding` where the model ties them."""
    final_norm: Tensor
    """[H]."""
    layers: tuple[LayerParameters, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """The destination of one tensor of a checkpoint."""

    tensor: Tensor
    """A view into the parameters."""
    transform: Callable[[Tensor], Tensor] | None = None
    """Computes the destination's values from the checkpoint's, which have `shape`; None = they are the same."""
    shape: tuple[int, ...] | None = None
    """The checkpoint's shape; None = the destination's."""

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape in the checkpoint."""
        return tuple(self.tensor.shape) if self.shape is None else self.shape


def allocate_parameters(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> Parameters:
    """Allocates uninitialised weights on `device`; the `meta` device gives the shapes alone."""
    empty = partial(_empty, dtype, device)
    norm = partial(_empty, torch.float32 if spec.wide_norms else dtype, device)
    hidden = spec.hidden_size
    embedding = empty(spec.vocab_size, hidden)
    return Parameters(
        embedding=embedding,
        lm_head=embedding if spec.tied_embeddings else empty(spec.vocab_size, hidden),
        final_norm=norm(hidden),
        layers=tuple(_layer(layer, hidden, empty, norm) for layer in spec.layers),
    )


def tensors_of(parameters: object, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields every tensor once with the name of its field; tied embeddings are one tensor."""
    seen: set[int] = set()
    for found, tensor in _walk(parameters, name):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield found, tensor


def weight_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Returns the bytes that `allocate_parameters` takes."""
    return sum(tensor.nbytes for _, tensor in tensors_of(allocate_parameters(spec, dtype, torch.device("meta"))))


def standard_places(spec: ModelSpec, parameters: Parameters) -> dict[str, Place]:
    """Returns the places under the names that Llama's checkpoints, and most others, have."""
    found = {
        "model.embed_tokens.weight": Place(parameters.embedding),
        "model.norm.weight": Place(parameters.final_norm),
    }
    if not spec.tied_embeddings:
        found["lm_head.weight"] = Place(parameters.lm_head)
    for number, (layer, weights) in enumerate(zip(spec.layers, parameters.layers, strict=True)):
        prefix = f"model.layers.{number}."
        found |= {prefix + name: place for name, place in layer_places(layer, weights).items()}
    return found


def layer_places(spec: LayerSpec, weights: LayerParameters) -> dict[str, Place]:
    """Returns one layer's places by their names after `model.layers.N.`."""
    found = {
        "input_layernorm.weight": Place(weights.input_norm),
        "post_attention_layernorm.weight": Place(weights.feed_forward_norm),
    }
    attention, feed_forward = spec.attention, weights.feed_forward
    if isinstance(attention, GroupedQueryAttention) and isinstance(weights.attention, AttentionParameters):
        found |= _attention_places(attention, weights.attention)
    if isinstance(feed_forward, DenseParameters):
        return found | dense_places("mlp.", feed_forward)
    return found | expert_places(feed_forward)


def dense_places(prefix: str, weights: DenseParameters) -> dict[str, Place]:
    """Returns the places of a feed-forward network whose gate and up are stored apart."""
    gate, up = weights.gate_up.chunk(2)
    found = {
        f"{prefix}gate_proj.weight": Place(gate),
        f"{prefix}up_proj.weight": Place(up),
        f"{prefix}down_proj.weight": Place(weights.down),
    }
    if weights.gate_up_bias is not None and weights.down_bias is not None:
        gate, up = weights.gate_up_bias.chunk(2)
        found |= {
            f"{prefix}gate_proj.bias": Place(gate),
            f"{prefix}up_proj.bias": Place(up),
            f"{prefix}down_proj.bias": Place(weights.down_bias),
        }
    return found


def expert_places(weights: Experts) -> dict[str, Place]:
    """Returns the places of a mixture of experts whose experts are stored one by one."""
    named = {
        "mlp.gate.weight": weights.router,
        "mlp.gate.bias": weights.router_bias,
        "mlp.gate.e_score_correction_bias": weights.choice_bias,
        "mlp.shared_expert_gate.weight": weights.shared_gate,
    }
    if weights.shared_gate_up is not None and weights.shared_down is not None:
        gate, up = weights.shared_gate_up.weight.chunk(2)
        named |= {"mlp.shared_experts.gate_proj.weight": gate, "mlp.shared_experts.up_proj.weight": up}
        named |= {"mlp.shared_experts.down_proj.weight": weights.shared_down.weight}
    for number, (gate_up, down) in enumerate(zip(weights.gate_up, weights.down, strict=True)):
        gate, up = gate_up.chunk(2)
        prefix = f"mlp.experts.{number}."
        named |= {f"{prefix}gate_proj.weight": gate, f"{prefix}up_proj.weight": up, f"{prefix}down_proj.weight": down}
    return {name: Place(tensor) for name, tensor in named.items() if tensor is not None}


def renamed(places: dict[str, Place], names: Mapping[str, str]) -> dict[str, Place]:
    """Returns the same places under other names: each key of `names` that occurs in one is replaced by its value."""
    found = {}
    for name, place in places.items():
        for old, new in names.items():
            if old in name:
                name = name.replace(old, new)  # noqa: PLW2901
                break
        found[name] = place
    return found


def _attention_places(spec: GroupedQueryAttention, weights: AttentionParameters) -> dict[str, Place]:
    shape = spec.shape
    rows = [shape.heads * shape.head_dim] + [shape.kv_heads * shape.head_dim] * 2
    names = [f"self_attn.{name}_proj" for name in "qkv"]
    found = {
        f"{name}.weight": Place(part) for name, part in zip(names, weights.qkv.split_with_sizes(rows), strict=True)
    }
    if weights.qkv_bias is not None:
        parts = weights.qkv_bias.split_with_sizes(rows)
        found |= {f"{name}.bias": Place(part) for name, part in zip(names, parts, strict=True)}
    single = {
        "o_proj.weight": weights.output,
        "o_proj.bias": weights.output_bias,
        "q_norm.weight": weights.q_norm,
        "k_norm.weight": weights.k_norm,
        "sinks": weights.sinks,
    }
    return found | {f"self_attn.{name}": Place(tensor) for name, tensor in single.items() if tensor is not None}


def _empty(dtype: torch.dtype, device: torch.device, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def _layer(spec: LayerSpec, hidden: int, empty: Empty, norm: Empty) -> LayerParameters:
    return LayerParameters(
        input_norm=norm(hidden),
        attention=_attention(spec.attention, hidden, empty, norm),
        attention_output_norm=norm(hidden) if spec.output_norms else None,
        feed_forward_norm=norm(hidden),
        feed_forward=(
            _experts(spec.feed_forward, hidden, empty)
            if isinstance(spec.feed_forward, MixtureOfExperts)
            else _dense(spec.feed_forward, hidden, empty)
        ),
        feed_forward_output_norm=norm(hidden) if spec.output_norms else None,
    )


def _attention(spec: Attention, hidden: int, empty: Empty, norm: Empty) -> AttentionParameters | LatentParameters:
    if isinstance(spec, LatentAttention):
        return _latent(spec, hidden, empty, norm)
    shape = spec.shape
    heads = spec.qk_norm // shape.head_dim  # 1, or all: the norm's elements over those of a head
    kv_elements = shape.head_dim if heads == 1 else shape.kv_heads * shape.head_dim
    return AttentionParameters(
        qkv=empty(shape.qkv_size, hidden),
        qkv_bias=empty(shape.qkv_size) if spec.qkv_bias else None,
        output=empty(hidden, shape.heads * shape.head_dim),
        output_bias=empty(hidden) if spec.output_bias else None,
        q_norm=norm(spec.qk_norm) if spec.qk_norm else None,
        k_norm=norm(kv_elements) if spec.qk_norm else None,
        sinks=empty(shape.heads).float() if spec.sinks else None,
    )


def _latent(spec: LatentAttention, hidden: int, empty: Empty, norm: Empty) -> LatentParameters:
    shape, rank = spec.shape, spec.query_rank
    queries = shape.heads * shape.query
    down = (queries if rank is None else rank) + shape.cached
    return LatentParameters(
        down=empty(down, hidden),
        down_bias=empty(down) if spec.bias else None,
        query_norm=None if rank is None else norm(rank),
        query_up=None if rank is None else empty(queries, rank),
        latent_norm=norm(shape.latent),
        kv_up=empty(shape.heads, shape.nope + shape.v_dim, shape.latent),
        output=empty(hidden, shape.heads * shape.v_dim),
        output_bias=empty(hidden) if spec.bias else None,
    )


def _dense(spec: DenseFeedForward, hidden: int, empty: Empty) -> DenseParameters:
    return DenseParameters(
        gate_up=empty(2 * spec.width, hidden),
        gate_up_bias=empty(2 * spec.width) if spec.bias else None,
        down=empty(hidden, spec.width),
        down_bias=empty(hidden) if spec.bias else None,
    )


def _experts(spec: MixtureOfExperts, hidden: int, empty: Empty) -> Experts:
    experts, width, router = spec.experts, spec.width, spec.router
    return Experts(
        router=empty(experts, hidden),
        router_bias=empty(experts) if router.bias else None,
        choice_bias=empty(experts).float() if router.choice_bias else None,
        gate_up=empty(experts, 2 * width, hidden),
        gate_up_bias=empty(experts, 2 * width) if spec.bias else None,
        down=empty(experts, hidden, width),
        down_bias=empty(experts, hidden) if spec.bias else None,
        shared_gate_up=Linear(empty(2 * spec.shared_width, hidden)) if spec.shared_width else None,
        shared_down=Linear(empty(hidden, spec.shared_width)) if spec.shared_width else None,
        shared_gate=empty(1, hidden) if spec.shared_gate else None,
    )


def _walk(found: object, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(found, Tensor):
        yield name, found
    elif isinstance(found, tuple):
        for each in found:
            yield from _walk(each, name)
    elif is_dataclass(found):
        for field in fields(found):
            yield from _walk(getattr(found, field.name), field.name)
