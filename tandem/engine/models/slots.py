"""The slots of a checkpoint's tensors in the parameters of a model."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.engine.config.model import DenseFeedForward, GroupedQueryAttention, LayerSpec, MixtureOfExperts, ModelSpec
from tandem.engine.config.state_layers import StateLayer
from tandem.engine.kernels.layers import Experts
from tandem.engine.kernels.packed_weight import Weight
from tandem.engine.models.parameters import (
    AttentionParameters,
    DenseParameters,
    LayerParameters,
    Parameters,
    StateParameters,
)

_STACKED_EXPERTS = re.compile(
    r"(?P<prefix>model\.layers\.(?P<layer>\d+)\.(.*\.)?)"
    r"(experts\.(gate_up|down)_proj(_bias)?|(?<=block_sparse_moe\.)(input|output)_linear\.weight)"
)
"""The names of tensors in which families stack the experts of a layer; those of Granite are linear layers."""


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
