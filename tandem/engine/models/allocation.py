"""Allocates a model's weights: packed if the spec's quantization says so, else plain."""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from tandem.cost_model.roofline import PackedWeights
from tandem.engine.config.attention import IndexShape
from tandem.engine.config.model import (
    Attention,
    DenseFeedForward,
    FeedForward,
    GatedDeltaNet,
    KimiDeltaAttention,
    LatentAttention,
    LayerSpec,
    Mamba2,
    MixtureOfExperts,
    ModelSpec,
    ShortConvolution,
    StateLayer,
)
from tandem.engine.config.quantization import STACKED_FORMATS, Codes, Packing, WeightFormat, WeightScheme
from tandem.engine.kernels.held_weight import held_bytes
from tandem.engine.kernels.layers import Experts, Linear
from tandem.engine.kernels.packed_weight import Float4Weight, PackedWeight, Weight
from tandem.engine.models.families import slots_of
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
    named_weights,
)
from tandem.engine.models.slots import ParameterSlot

Empty = Callable[..., Tensor]
_T = TypeVar("_T")
_META = torch.device("meta")
_MATRIX = 2
"""The number of dimensions of a weight matrix; the weights of experts have one more."""
_PACKED_FIELDS = {
    "embedding",
    "lm_head",
    "qkv",
    "output",
    "down",
    "query_up",
    "gate_up",
    "weight",
    "projections",
    "decay_up",
    "index_key",
}
"""The fields of `Parameters` whose weights may be packed."""
_PLAIN_FIELDS = {"router", "shared_gate", "head_weights"}
"""The fields that no tool quantizes, even if its configuration includes all linear layers."""
_CODES = {Codes.INT8: torch.int8, Codes.FLOAT8: torch.float8_e4m3fn, Codes.INT4: torch.uint8}
"""The dtype of the codes of a `PackedWeight`; those of a `Float4Weight` are uint8."""


class QuantizedWeights(NamedTuple):
    """The weights of a model that are quantized in the checkpoint, and those of them that stay packed in memory."""

    schemes: Mapping[str, WeightScheme]
    """The scheme of each quantized tensor of the checkpoint, by its name in `slots_of`."""
    packings: Mapping[str, Packing]
    """The format of each packed parameter, by its name in `named_weights`."""
    dequantized: tuple[str, ...]
    """The names of the quantized tensors that are dequantized when they are loaded."""


def allocate_parameters(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> Parameters:
    """Allocate uninitialized weights on `device`.

    On the `meta` device they have shapes but no memory.
    """
    packings = quantized_weights(spec).packings
    if not packings:
        return _plain_parameters(spec, dtype, device)
    made: dict[int, Weight] = {}

    def make(path: str, shape: Tensor) -> Weight:
        if id(shape) not in made:
            packing = packings.get(path)
            made[id(shape)] = _empty_like(shape, device) if packing is None else empty(shape, packing)
        return made[id(shape)]

    def empty(shape: Tensor, packing: Packing) -> PackedWeight:
        return empty_packed(tuple(shape.shape), packing, device)

    return _mapped(_plain_parameters(spec, dtype, _META), make)


def allocate_ends(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> Parameters:
    """Allocate the embedding, the final norm and the output layer.

    All other weights have shapes but no memory.
    """
    shapes = allocate_parameters(spec, dtype, _META)
    embedding = empty_on(device, shapes.embedding)
    head = embedding if shapes.lm_head is shapes.embedding else empty_on(device, shapes.lm_head)
    return replace(shapes, embedding=embedding, lm_head=head, final_norm=empty_on(device, shapes.final_norm))


def empty_on(device: torch.device, tree: _T) -> _T:
    """Return uninitialized weights on `device`, in the shapes of `tree`: a weight, or a tree of dataclasses and tuples.

    A tensor that occurs several times in the tree stays one tensor.
    """
    made: dict[int, Tensor] = {}

    def make(_: str, shape: Tensor) -> Tensor:
        return made.setdefault(id(shape), _empty_like(shape, device))

    return _mapped(tree, make)


def weight_bytes(spec: ModelSpec, dtype: torch.dtype, *, on_cpu: bool = False) -> int:
    """Return the size of all weights in bytes; see `parameter_bytes`."""
    return parameter_bytes(allocate_parameters(spec, dtype, _META), on_cpu=on_cpu)


def parameter_bytes(parameters: Parameters, *, on_cpu: bool) -> int:
    """Return the size of these weights in bytes.

    Packed weights have the size in which the kernels of a CPU or GPU keep them.
    """
    item_bytes = parameters.dtype.itemsize
    return sum(
        held_bytes(weight, item_bytes, on_cpu=on_cpu) if isinstance(weight, PackedWeight) else weight.nbytes
        for _, weight in named_weights(parameters)
    )


class SavedBytes(NamedTuple):
    """The memory that packed weights save, in bytes, compared with plain weights.

    Packed weights have the size in which the kernels keep them.
    """

    every_step: int
    """The bytes saved in matrices that every step reads."""
    experts: int
    table: int
    """The bytes saved in the embedding; 0 if the embedding is also the output layer."""


def saved_bytes(spec: ModelSpec, item_bytes: int, *, on_cpu: bool) -> SavedBytes:
    """Return the bytes that packed weights save; a plain weight has `item_bytes` bytes per element."""
    if spec.quantization is None:
        return SavedBytes(0, 0, 0)
    every_step = experts = table = 0
    for path, weight in named_weights(allocate_parameters(spec, torch.float32, _META)):
        if isinstance(weight, PackedWeight):
            saved = weight.shape.numel() * item_bytes - held_bytes(weight, item_bytes, on_cpu=on_cpu)
            if path == "embedding" and not spec.tied_embeddings:
                table += saved
            elif len(weight.shape) > 2:
                experts += saved
            else:
                every_step += saved
    return SavedBytes(every_step, experts, table)


def packed_weights(spec: ModelSpec) -> PackedWeights:
    """Return the number and sizes of packed matrices, by the way in which GPUs multiply them.

    Embeddings and experts are not counted.
    """
    if spec.quantization is None:
        return PackedWeights()
    packed = [
        weight
        for path, weight in named_weights(allocate_parameters(spec, torch.float32, _META))
        if isinstance(weight, PackedWeight) and len(weight.shape) == _MATRIX and path != "embedding"
    ]
    unpacked = (matrix.shape.numel() for matrix in packed if not matrix.quantized_inputs)
    float8 = (
        matrix.shape.numel() for matrix in packed if matrix.quantized_inputs and matrix.codes.dtype.is_floating_point
    )
    return PackedWeights(len(packed), sum(unpacked), sum(float8))


@cache
def quantized_weights(spec: ModelSpec) -> QuantizedWeights:
    """Return the quantization scheme of each tensor of the checkpoint, and the format of each packed parameter.

    A parameter is packed if all tensors stacked in it have the same format.
    """
    if spec.quantization is None:
        return QuantizedWeights({}, {}, ())
    shapes = _plain_parameters(spec, torch.float32, _META)
    paths = {id(weight.untyped_storage()): path for path, weight in named_weights(shapes) if isinstance(weight, Tensor)}
    schemes: dict[str, WeightScheme] = {}
    formats: dict[str, set[Packing | None]] = {}
    stacked: dict[str, str] = {}
    for name, slot in slots_of(spec, shapes).items():
        assert isinstance(slot.tensor, Tensor)
        stacked[name] = path = paths[id(slot.tensor.untyped_storage())]
        scheme = _scheme(spec, name, slot, path.rpartition(".")[2])
        if scheme is not None:
            schemes[name] = scheme
        formats.setdefault(path, set()).add(None if scheme is None else scheme.packing(slot.tensor.shape[-1]))
    packings = {}
    for path, forms in formats.items():
        form = next(iter(forms))
        if len(forms) == 1 and form is not None and path.rpartition(".")[2] in _PACKED_FIELDS:
            packings[path] = form
    return QuantizedWeights(schemes, packings, tuple(name for name in schemes if stacked[name] not in packings))


def packing_of(weight: PackedWeight) -> Packing:
    """Return the format of a packed weight."""
    is_float4 = isinstance(weight, Float4Weight)
    codes = Codes.FLOAT4 if is_float4 else next(name for name, dtype in _CODES.items() if dtype == weight.codes.dtype)
    scales = str(weight.scales.dtype).removeprefix("torch.")
    return Packing(codes, weight.group, weight.offsets is not None, scales, weight.quantized_inputs)


def _scheme(spec: ModelSpec, name: str, slot: ParameterSlot, field: str) -> WeightScheme | None:
    """Return the quantization scheme of a tensor; None if it is not quantized."""
    assert spec.quantization is not None
    if field in _PLAIN_FIELDS or len(slot.tensor.shape) < 2:
        return None
    scheme = spec.quantization.scheme_of(name.removesuffix(".weight"))
    if scheme is None:
        return None
    if scheme.format is WeightFormat.ROUND_TO_NEAREST:
        return scheme if field in _PACKED_FIELDS and scheme.packing(slot.tensor.shape[-1]) else None
    named = name.endswith(".weight") or scheme.format in STACKED_FORMATS
    # A matrix with the columns of its destination is changed by rows, which codes are, too.
    by_rows = slot.shape is None or (len(slot.shape) == _MATRIX and slot.shape[-1] == slot.tensor.shape[-1])
    return scheme if named and by_rows else None


def empty_packed(shape: tuple[int, ...], packing: Packing, device: torch.device) -> PackedWeight:
    """Return an uninitialized packed weight [..., N, K]."""
    *outer, columns = shape
    scales = partial(torch.empty, (*outer, columns // packing.group), dtype=getattr(torch, packing.scales))
    if packing.codes is Codes.FLOAT4:
        codes = torch.empty(*outer, columns // 2, dtype=torch.uint8, device=device)
        factors = torch.empty(outer, dtype=torch.float32, device=device)
        return Float4Weight(codes, scales(device=device), None, packing.group, factors)
    stored = columns // 2 if packing.codes is Codes.INT4 else columns
    return PackedWeight(
        torch.empty(*outer, stored, dtype=_CODES[packing.codes], device=device),
        scales(device=device),
        scales(device=device) if packing.offsets else None,
        packing.group,
        quantized_inputs=packing.quantized_inputs,
    )


def _mapped(tree: _T, make: Callable[[str, Tensor], Weight], path: str = "") -> _T:
    """Return a copy of a tree of dataclasses and tuples, with each tensor replaced by the result of `make`.

    `path` is the path of the tree's field, as in `named_weights`.
    """
    result: Any = tree
    if isinstance(tree, Tensor):
        result = make(path, tree)
    elif isinstance(tree, tuple):
        result = tuple(_mapped(item, make, f"{path}.{number}") for number, item in enumerate(tree))
    elif is_dataclass(tree):
        start = f"{path}." if path else ""
        values = {field.name: _mapped(getattr(tree, field.name), make, start + field.name) for field in fields(tree)}
        result = replace(tree, **values)  # type: ignore[type-var]  # it is an instance
    mapped: _T = result
    return mapped


def _plain_parameters(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> Parameters:
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


def _empty(dtype: torch.dtype, device: torch.device, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def _empty_like(shape: Tensor, device: torch.device) -> Tensor:
    """Return what `torch.empty_like` does, which imports SymPy for tensors on `meta`: 0.6 s of CPU for each start."""
    return _empty(shape.dtype, device, *shape.shape)


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
