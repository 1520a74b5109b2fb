"""The weights of a model, layer by layer, and their slots in a checkpoint.

q, k and v are stacked into one matrix for the kernels, and so are gate and up. H is the hidden size, E the number of
experts, I the inner size of a feed-forward network.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass

import torch
from torch import Tensor

from tandem.engine.config.model import (
    DenseFeedForward,
    GroupedQueryAttention,
    LayerSpec,
    MixtureOfExperts,
    ModelSpec,
    StateLayer,
)
from tandem.engine.kernels.layers import Experts
from tandem.engine.kernels.packed_weight import PackedWeight, Weight

_STACKED_EXPERTS = re.compile(
    r"(?P<prefix>model\.layers\.(?P<layer>\d+)\.(.*\.)?)"
    r"(experts\.(gate_up|down)_proj(_bias)?|(?<=block_sparse_moe\.)(input|output)_linear\.weight)"
)
"""The names of tensors in which families stack the experts of a layer; those of Granite are linear layers."""


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


@dataclass(frozen=True, slots=True)
class ParameterSlot:
    """The destination of one tensor of a checkpoint in the model's parameters."""

    tensor: Weight
    """The destination, a view into the parameters."""
    transform: Callable[[Tensor], Tensor] | None = None
    """A function that computes the destination's values from a tensor of `shape`; None = copy the values unchanged.

    If the destination is a matrix with as many columns, the function only reorders or repeats rows, so that it can be
    applied to codes and scales, too.
    """
    shape: tuple[int, ...] | None = None
    """The shape of the stored tensor, or of the part of it that this rank reads; None = the destination's shape."""
    stacked: tuple[int, ...] = ()
    """The number of rows of each stacked weight, if the checkpoint stacks several weights in one tensor; else empty.

    Each of the stacked weights is divided among the ranks separately. The rows are counted in the destination, so on
    several ranks they are this rank's rows, not the checkpoint's.
    """
    summed: bool = False
    """True for the bias of a layer whose outputs are summed over all ranks.

    The stage's first rank has the bias, and its other ranks have zeros. Biases of experts that are whole on a rank are
    divided with the experts.
    """
    part: "StoredPart | None" = None
    """The part of the checkpoint's tensor that this rank reads; None = the whole tensor."""

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor in the checkpoint."""
        return self.own_shape if self.part is None else self.part.shape

    @property
    def own_shape(self) -> tuple[int, ...]:
        """The shape of this rank's part of the tensor in the checkpoint."""
        return tuple(self.tensor.shape) if self.shape is None else self.shape

    def values(self, stored: Tensor) -> Tensor:
        """Return the destination's values, computed from the whole tensor of the checkpoint."""
        own = stored if self.part is None else self.part.of(stored)
        return own if self.transform is None else self.transform(own)


@dataclass(frozen=True, slots=True)
class StoredPart:
    """The part of a checkpoint's tensor that one rank reads: ranges along one dimension, concatenated."""

    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    dim: int = 0
    ranges: tuple[range, ...] = ()
    """The ranges along `dim`; empty = this rank has zeros of the same shape instead of the stored values."""

    def of(self, stored: Tensor, group: int = 1) -> Tensor:
        """Return this rank's part of `stored`: a tensor of `shape`, or the scales or offsets of a quantized weight.

        `group` is the number of the weight's columns that share one value of `stored`, for example one scale.
        """
        if not self.ranges:
            return torch.zeros_like(stored)
        divisor = group if self.dim == len(self.shape) - 1 else 1
        parts = [stored.narrow(self.dim, span.start // divisor, len(span) // divisor) for span in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)


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


def standard_slots(spec: ModelSpec, parameters: Parameters) -> dict[str, ParameterSlot]:
    """Return the slots of a model by tensor name, with the names of Llama's checkpoints.

    Most other models use these names as well.
    """
    slots = {
        "model.embed_tokens.weight": ParameterSlot(parameters.embedding),
        "model.norm.weight": ParameterSlot(parameters.final_norm),
    }
    if parameters.final_norm_bias is not None:
        slots["model.norm.bias"] = ParameterSlot(parameters.final_norm_bias)
    if not spec.tied_embeddings:
        slots["lm_head.weight"] = ParameterSlot(parameters.lm_head)
    for number, (layer, weights) in enumerate(zip(spec.layers, parameters.layers, strict=True)):
        prefix = f"model.layers.{number}."
        slots |= {prefix + name: slot for name, slot in layer_slots(layer, weights).items()}
    return slots


def layer_slots(spec: LayerSpec, weights: LayerParameters) -> dict[str, ParameterSlot]:
    """Return the slots of one layer, by tensor name without the prefix `model.layers.N.`."""
    norms = {"input_layernorm.weight": weights.input_norm, "input_layernorm.bias": weights.input_norm_bias}
    if not spec.parallel:
        norms["post_attention_layernorm.weight"] = weights.feed_forward_norm
        norms["post_attention_layernorm.bias"] = weights.feed_forward_norm_bias
    slots = {name: ParameterSlot(norm) for name, norm in norms.items() if norm is not None}
    attention, feed_forward = spec.attention, weights.feed_forward
    if isinstance(attention, GroupedQueryAttention) and isinstance(weights.attention, AttentionParameters):
        slots |= _attention_slots(attention, weights.attention)
    if feed_forward is None:
        return slots
    if isinstance(feed_forward, DenseParameters):
        assert isinstance(spec.feed_forward, DenseFeedForward)
        return slots | dense_slots("mlp.", feed_forward, gated=spec.feed_forward.gated)
    assert isinstance(spec.feed_forward, MixtureOfExperts)
    return slots | expert_slots(spec.feed_forward, feed_forward)


def dense_slots(
    prefix: str, weights: DenseParameters, *, gated: bool = True, summed: bool = True
) -> dict[str, ParameterSlot]:
    """Return the slots of a feed-forward network whose gate, if it has one, and up matrices are stored separately.

    `summed` is that of the bias of the down projection.
    """
    names = ("gate_proj", "up_proj") if gated else ("up_proj",)
    parts: Sequence[Weight] = weights.gate_up.chunk(len(names))
    slots = {f"{prefix}{name}.weight": ParameterSlot(part) for name, part in zip(names, parts, strict=True)}
    slots[f"{prefix}down_proj.weight"] = ParameterSlot(weights.down)
    if weights.gate_up_bias is not None and weights.down_bias is not None:
        biases = zip(names, weights.gate_up_bias.chunk(len(names)), strict=True)
        slots |= {f"{prefix}{name}.bias": ParameterSlot(bias) for name, bias in biases}
        slots[f"{prefix}down_proj.bias"] = ParameterSlot(weights.down_bias, summed=summed)
    return slots


def stacked_gate_up(weights: DenseParameters) -> ParameterSlot:
    """Return the slot of a matrix in which a checkpoint stacks gate and up, gate rows first."""
    rows = weights.gate_up.shape[0] // 2
    return ParameterSlot(weights.gate_up, stacked=(rows, rows))


def expert_slots(spec: MixtureOfExperts, weights: Experts) -> dict[str, ParameterSlot]:
    """Return the slots of a mixture of experts whose experts are stored separately."""
    named: dict[str, Weight | None] = {
        "mlp.gate.weight": weights.router,
        "mlp.gate.bias": weights.router_bias,
        "mlp.gate.e_score_correction_bias": weights.choice_bias,
        "mlp.shared_expert_gate.weight": weights.shared_gate,
    }
    slots = {name: ParameterSlot(tensor) for name, tensor in named.items() if tensor is not None}
    if weights.shared_gate_up is not None and weights.shared_down is not None:
        shared = DenseParameters(weights.shared_gate_up.weight, None, weights.shared_down.weight, None)
        slots |= dense_slots("mlp.shared_experts.", shared, gated=spec.gated)
    return slots | _separate_slots("mlp.experts.", spec, weights)


def with_separate_experts(
    spec: ModelSpec, parameters: Parameters, slots: Mapping[str, ParameterSlot]
) -> dict[str, ParameterSlot]:
    """Return the slots with one for each matrix and bias of each expert, in place of those of stacked experts."""
    stacked = [match for name in slots if (match := _STACKED_EXPERTS.fullmatch(name))]
    replaced = {match[0] for match in stacked}
    separate = {name: slot for name, slot in slots.items() if name not in replaced}
    for prefix, number in dict.fromkeys((match["prefix"], int(match["layer"])) for match in stacked):
        network, weights = spec.layers[number].feed_forward, parameters.layers[number].feed_forward
        assert isinstance(network, MixtureOfExperts)
        assert isinstance(weights, Experts)
        separate |= _separate_slots(f"{prefix}experts.", network, weights)
    return separate


def _separate_slots(prefix: str, spec: MixtureOfExperts, weights: Experts) -> dict[str, ParameterSlot]:
    slots: dict[str, ParameterSlot] = {}
    # The bias of an expert that is whole on a rank is added once.
    summed = len(spec.local_experts) == spec.experts
    for index, number in enumerate(spec.local_experts):
        biases = [None if bias is None else bias[index] for bias in (weights.gate_up_bias, weights.down_bias)]
        expert = DenseParameters(weights.gate_up[index], biases[0], weights.down[index], biases[1])
        slots |= dense_slots(f"{prefix}{number}.", expert, gated=spec.gated, summed=summed)
    return slots


def renamed(slots: dict[str, ParameterSlot], names: Mapping[str, str]) -> dict[str, ParameterSlot]:
    """Return the slots under other names, which `names` defines.

    In each name, the first key of `names` that it contains is replaced by that key's value.
    """
    result = {}
    for name, slot in slots.items():
        for old, new in names.items():
            if old in name:
                name = name.replace(old, new)  # noqa: PLW2901
                break
        result[name] = slot
    return result


def _attention_slots(spec: GroupedQueryAttention, weights: AttentionParameters) -> dict[str, ParameterSlot]:
    sizes = spec.projected.qkv_rows
    names = [f"self_attn.{name}_proj" for name, size in zip("qkv", sizes, strict=True) if size]
    rows = tuple(size for size in sizes if size)
    gate = (rows[0],) if spec.output_gate else ()
    stacked: Sequence[Weight] = weights.qkv.split_with_sizes((*gate, *rows))[len(gate) :]
    slots = {f"{name}.weight": ParameterSlot(part) for name, part in zip(names, stacked, strict=True)}
    if weights.qkv_bias is not None:
        parts = weights.qkv_bias.split_with_sizes((*gate, *rows))[len(gate) :]
        slots |= {f"{name}.bias": ParameterSlot(part) for name, part in zip(names, parts, strict=True)}
    if spec.output_gate:
        slots |= _gated_query_slots(spec, weights)
    single: dict[str, Weight | None] = {
        "o_proj.weight": weights.output,
        "o_proj.bias": weights.output_bias,
        "q_norm.weight": weights.q_norm,
        "k_norm.weight": weights.k_norm,
        "sinks": weights.sinks,
    }
    return slots | {
        f"self_attn.{name}": ParameterSlot(tensor, summed=name == "o_proj.bias")
        for name, tensor in single.items()
        if tensor is not None
    }


def _gated_query_slots(spec: GroupedQueryAttention, weights: AttentionParameters) -> dict[str, ParameterSlot]:
    """Return the slots of q projections in which the rows of each head are followed by those of its output gate."""
    size, dim = 2 * spec.shape.qkv_rows[0], spec.shape.head_dim

    def gate_first(stored: Tensor) -> Tensor:
        return torch.unflatten(stored, 0, (-1, 2, dim)).transpose(0, 1).flip(0).flatten(0, 2)

    slots = {"self_attn.q_proj.weight": ParameterSlot(weights.qkv[:size], gate_first)}
    if weights.qkv_bias is not None:
        slots["self_attn.q_proj.bias"] = ParameterSlot(weights.qkv_bias[:size], gate_first)
    return slots


def state_slots(spec: StateLayer, weights: StateParameters, names: Mapping[str, str]) -> dict[str, ParameterSlot]:
    """Return the slots of a state layer, by the names that `names` gives to the fields of `StateParameters`.

    The input projections are not included, because each family stores them in its own way.
    """
    channels = tuple(size * spec.state.heads for size in spec.convolved)
    convolution = weights.convolution
    slots = {
        "convolution": ParameterSlot(
            convolution, _without_middle, (convolution.shape[0], 1, convolution.shape[1]), stacked=channels
        )
    }
    if weights.convolution_bias is not None:
        slots["convolution_bias"] = ParameterSlot(weights.convolution_bias, stacked=channels)
    plain: dict[str, Weight | None] = {
        "decay_log": weights.decay_log,
        "step_bias": weights.step_bias,
        "skip": weights.skip,
        "state_norm": weights.state_norm,
        "output": weights.output,
        "output_bias": weights.output_bias,
    }
    slots |= {
        field: ParameterSlot(tensor, summed=field == "output_bias")
        for field, tensor in plain.items()
        if tensor is not None
    }
    return {names[field]: slot for field, slot in slots.items()}


def _without_middle(stored: Tensor) -> Tensor:
    return stored.squeeze(1)


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
